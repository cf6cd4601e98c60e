"""Sentences in other languages to translate, put together from parts of our own writing.

A German sentence is: time, verb, subject, rest, and perhaps a clause. Since the time stands first, the verb comes
second and the subject third, and every subject goes with every predicate.
"""

from __future__ import annotations

from typing import Final


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


GERMAN_TIMES: Final = _lines("""
    Am Montag
    Gestern Abend
    Nach langen Verhandlungen
    Im vergangenen Jahr
    Seit dem Frühjahr
    Zum ersten Mal seit zehn Jahren
    Kurz vor Mitternacht
    In den nächsten Wochen
    Trotz der Kritik
    Wegen des schlechten Wetters
    Während der Konferenz in Wien
    Noch vor wenigen Monaten
    Bei einem Treffen in Hamburg
    Unter strengen Auflagen
    Nach Angaben der Behörden
    Am frühen Morgen
    Im Sommer
    Ohne Vorwarnung
    Überraschend
    Vor dem Landgericht
    Im Süden des Landes
    Auf Druck der Opposition
    Heute
    Zwei Tage später
    Mit großer Mehrheit
    Nach dem Spiel
    In einem Interview
    Laut einer neuen Studie
    Am Ende
    Dennoch
    Inzwischen
    Jeden zweiten Donnerstag
    Im Jahr 1987
    Bis zum Herbst
    Anders als erwartet
    Auch deshalb
""")
GERMAN_SUBJECTS: Final = _lines("""
    die Regierung
    der Minister
    eine Sprecherin der Polizei
    der Verein
    die Stadtverwaltung
    ein junger Arzt aus Leipzig
    die Gewerkschaft
    der Trainer
    das Unternehmen
    eine Gruppe von Forschern
    der Bürgermeister
    die Europäische Kommission
    ein Zeuge
    die Bank
    der Hersteller
    die Nachbarin
    das Gericht
    der Präsident
    die Universität
    ein Landwirt aus Bayern
    die Fluggesellschaft
    das Museum
    der Vorstand
    die Mehrheit der Wähler
    ein bekannter Schriftsteller
    die Feuerwehr
    der Botschafter
    meine Großmutter
    das Krankenhaus
    die Lehrerin
    der Torwart
    ein Konzern aus der Schweiz
    die Familie
    der Angeklagte
    das Parlament
    niemand
    die Zeitung
    ein Hund
    die Jugend
    der Verkehrsverbund
""")
# Verb, then what follows the subject.
GERMAN_PREDICATES: Final = tuple(tuple(line.split(" | ")) for line in _lines("""
    stellte | einen neuen Plan für den Ausbau der Bahn vor
    kündigte | höhere Preise für Strom und Gas an
    lehnte | den Vorschlag ohne Begründung ab
    forderte | mehr Geld für Schulen und Kindergärten
    hat | den Vertrag um drei Jahre verlängert
    will | die Zahl der Unfälle deutlich senken
    konnte | die Ursache des Feuers noch nicht klären
    berichtete | von großen Schäden an Häusern und Straßen
    verlor | mehr als zwei Millionen Euro
    gewann | den Preis für das beste Buch des Jahres
    warnte | vor den Folgen des Klimawandels
    muss | sich auf einen harten Winter einstellen
    eröffnete | eine Ausstellung über das Leben am Meer
    entschied | sich für einen anderen Weg
    hofft | auf eine schnelle Lösung
    suchte | vergeblich nach einer Wohnung in der Innenstadt
    wurde | von der Nachricht völlig überrascht
    zeigte | sich mit dem Ergebnis zufrieden
    verkaufte | das alte Fabrikgelände an einen Investor
    begann | mit den Arbeiten an der Brücke
    bedankte | sich bei allen Helfern
    kritisierte | die Entscheidung scharf
    half | den Menschen in den überfluteten Dörfern
    fand | in einem Wald bei Kassel eine alte Münze
    wollte | zu den Vorwürfen nichts sagen
    reiste | mit dem Zug nach Italien
    plant | den Bau von achthundert neuen Wohnungen
    veröffentlichte | einen Bericht über die Lage der Flüchtlinge
    kam | erst nach zwei Stunden am Flughafen an
    schrieb | einen Brief an die Kanzlerin
    spielte | im Finale nur eine kleine Rolle
    verzichtete | auf eine Entschuldigung
    untersuchte | den Zusammenhang zwischen Schlaf und Gedächtnis
    setzte | sich für die Rechte von Arbeitern ein
    zog | die Klage nach wenigen Tagen zurück
    erhöhte | die Löhne um vier Prozent
    sprach | mit Journalisten über die Zukunft des Vereins
    rettete | drei Kinder aus einem brennenden Haus
    verschob | die Wahl auf den nächsten Monat
    baute | im Garten ein Haus für Igel
    erinnerte | an die Opfer des Krieges
    lernte | in nur einem Jahr fließend Polnisch
    senkte | die Prognose für das Wachstum
    stand | stundenlang im Stau
    erklärte | den Schülern die Regeln der Grammatik
    unterschrieb | ein Abkommen mit sechs Nachbarstaaten
    vergaß | die Schlüssel im Büro
    führte | ein Tempolimit in der Altstadt ein
    trat | nach heftigem Streit von allen Ämtern zurück
    vermutete | einen technischen Fehler
    entwickelte | ein Gerät zur Messung von Feinstaub
    bestätigte | den Verdacht nur zum Teil
    erreichte | das Ziel mit großem Vorsprung
    kaufte | auf dem Markt frisches Gemüse
    prüft | die Einführung einer neuen Steuer
    schloss | vier Filialen in kleinen Städten
    verteidigte | die umstrittenen Maßnahmen
    besuchte | ein Dorf an der Grenze zu Tschechien
    rechnet | mit Kosten von rund einer halben Milliarde
    überlebte | den Unfall nur durch Zufall
"""))  # fmt: skip
GERMAN_CLAUSES: Final = _lines("""
    .
    .
    .
    , weil die Kosten stark gestiegen waren.
    , obwohl viele Bürger dagegen waren.
    , wie die Polizei am Abend mitteilte.
    , um Arbeitsplätze zu sichern.
    , ohne die Öffentlichkeit zu informieren.
    , nachdem ein Gutachten erschienen war.
    , aber das reicht nach Ansicht von Fachleuten nicht aus.
    , und das soll sich so bald nicht ändern.
    , damit so etwas nicht noch einmal passiert.
    , was in der Region für Aufsehen sorgte.
    , denn die Zeit war knapp.
    , bevor die Sitzung zu Ende war.
    , während draußen Tausende protestierten.
    , sagte ein Sprecher.
    , so steht es in einem Bericht, der gestern veröffentlicht wurde.
    , wobei es keine Verletzten gab.
    , die Gründe dafür sind unklar.
    ; weitere Einzelheiten sollen folgen.
    , ein Erfolg, mit dem kaum jemand gerechnet hatte.
    , solange das Gesetz nicht geändert wird.
    , als plötzlich das Licht ausging.
""")
FRENCH_TIMES: Final = _lines("""
    Hier soir,
    Depuis plusieurs mois,
    En 2015,
    Selon le journal local,
    Malgré la pluie,
    Après une longue réunion,
    Chaque été,
    Pour la première fois,
    Dans le sud du pays,
    Aujourd'hui,
    Sans surprise,
    Pendant la guerre,
""")
FRENCH_SUBJECTS: Final = _lines("""
    le gouvernement
    le maire de la ville
    mon voisin
    le directeur du musée
    un groupe de chercheurs
    le syndicat
    un médecin de Lyon
    le club
    le conseil municipal
    un agriculteur
    le ministre de la Santé
    le train de nuit
""")
FRENCH_PREDICATES: Final = _lines("""
    a annoncé une baisse des prix.
    a refusé de répondre aux questions des journalistes.
    a ouvert une école dans un petit village.
    a perdu la moitié de son budget.
    a demandé l'aide des pays voisins.
    a découvert une peinture très ancienne.
    a changé d'avis au dernier moment.
    a reçu un prix pour son travail.
    veut construire un pont sur la rivière.
    doit quitter la région avant l'hiver.
    a trouvé une solution qui convient à tout le monde.
    a promis de protéger la forêt et les animaux.
    est arrivé avec deux heures de retard.
    a publié un rapport sur la qualité de l'eau.
""")
SPANISH_TIMES: Final = _lines("""
    Ayer por la tarde,
    Desde hace años,
    En el norte del país,
    Según los vecinos,
    A pesar del frío,
    Después del partido,
    Cada domingo,
    Por primera vez,
    Durante la crisis,
    Hoy,
    Sin aviso,
    El próximo mes,
""")
SPANISH_SUBJECTS: Final = _lines("""
    el gobierno
    el alcalde
    un grupo de estudiantes
    el hospital
    mi hermano
    el presidente del banco
    un pescador
    el equipo
    el tribunal
    un escritor famoso
    el sindicato
    el museo
""")
SPANISH_PREDICATES: Final = _lines("""
    recibió una carta que nadie esperaba.
    anunció un plan para reducir el ruido en las calles.
    perdió más de un millón de euros.
    decidió cerrar dos fábricas.
    encontró una moneda antigua cerca del río.
    pidió más tiempo para estudiar el caso.
    celebró su aniversario con una gran fiesta.
    quiere plantar diez mil árboles.
    no pudo explicar las causas del accidente.
    firmó un acuerdo con los países vecinos.
    llegó tarde a la reunión.
    ayudó a las familias que habían perdido su casa.
    vendió todos los libros en una semana.
    publicó un estudio sobre el sueño de los niños.
""")
# To be translated from English.
ENGLISH: Final = _lines("""
    The library in {place} is closed on {weekday}s.
    {name} bought {n:2-30} {things} at the market.
    I would like to know more about {subject}.
    My friend {name} works as a {job} in {place}.
    The {animal} sleeps under the old tree.
    Could you tell me how to get to the station?
    We talked for hours about {subject}.
    {name} has lived in {country} for {n:2-40} years.
    The weather will be better on {weekday}.
    Nobody knows why the {job} left the town.
    The meeting about {subject} starts at {n:8-11} o'clock.
    She said that {invention} had changed her life.
""")
# {source}: the language's name; {text}: what to translate.
TO_ENGLISH: Final = _lines("""
    Translate from {source} to English: {text}
    Translate this {source} sentence into English.\\n\\n{text}
    {text}\\n\\nTranslate the text above into English.
    What does this mean in English? "{text}"
    {source}: {text}\\nEnglish:
    Please give me an English translation of this {source} text: {text}
    How would you say this in English: {text}
    Translate {source} to English.\\n{text}
    Give the English for: {text}
    I received this message in {source}. What does it say in English?\\n\\n{text}
""")
FROM_ENGLISH: Final = _lines("""
    Translate from English to {source}: {text}
    How do you say "{text}" in {source}?
    Translate this sentence into {source}.\\n\\n{text}
    English: {text}\\n{source}:
""")
GERMAN_WRITING: Final = _lines("""
    Schreibe drei einfache Sätze auf Deutsch über das Thema: {subject}.
    Schreibe einen kurzen Text auf Deutsch über {place}.
    Schreibe einen kurzen deutschen Zeitungsartikel über {country}.
    Schreibe auf Deutsch eine E-Mail von {name} an {name}.
    Erzähle auf Deutsch eine kurze Geschichte von {name} aus {place}.
    Erkläre auf Deutsch, was ein {job} macht (das Wort ist Englisch).
""")
