"""`python -m tandem.cli`: the `tandem` command where the script is not on the path."""

from tandem.cli import main

if __name__ == "__main__":
    main()
