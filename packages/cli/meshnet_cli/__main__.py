"""`python -m meshnet_cli`: how `meshnet up` starts its children, with the very interpreter that runs it."""

from meshnet_cli.main import main

if __name__ == "__main__":
    main()
