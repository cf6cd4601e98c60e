#!/usr/bin/env bash
# An authority of your own, and a certificate that it signed for each service: for mutual TLS between them, and for
# HTTPS at the gateway where there is no certificate from elsewhere.
#
#   deploy/certificates.sh FOLDER [NAME ...]
#
# writes ca.pem and ca.key, and gateway, target and draft, .pem and .key each. The names are those of
# docker-compose.yml, localhost and 127.0.0.1; each NAME, a host's or an address, is added to all of them. What is there
# already stays: delete a service's two files, and the next run makes them anew; delete ca.pem, and it begins from nothing.
#
# The authority's key lets its holder be any of the services: keep it elsewhere.
set -euo pipefail

(($# >= 1)) || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
shift
days=${TANDEM_CERTIFICATE_DAYS:-825}

umask 077
mkdir -p "$folder"
chmod 700 "$folder" # nobody else on this machine gets in
cd "$folder"

key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }

if [[ ! -e ca.pem ]]; then
    rm -f {gateway,target,draft}.{pem,key}
    key ca.key
    openssl req -x509 -new -key ca.key -days "$days" -subj "/CN=Tandem authority" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.pem
fi

for service in gateway target draft; do
    [[ -e $service.pem && -e $service.key ]] && continue
    names="DNS:$service,DNS:localhost,IP:127.0.0.1"
    for name in "$@"; do
        if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then names+=",IP:$name"; else names+=",DNS:$name"; fi
    done
    key "$service.key"
    # Both usages: the gateway serves clients and calls services; a service's health check calls the service itself.
    openssl req -new -key "$service.key" -subj "/CN=$service" |
        openssl x509 -req -days "$days" -CA ca.pem -CAkey ca.key -out "$service.pem" 2>/dev/null -extfile <(
            printf '%s\n' "subjectAltName=$names" "basicConstraints=critical,CA:FALSE" \
                "keyUsage=critical,digitalSignature" "extendedKeyUsage=serverAuth,clientAuth"
        )
    # The containers' user is another than you: the folder keeps others out, the files do not.
    chmod 644 "$service.pem" "$service.key"
done
chmod 644 ca.pem
