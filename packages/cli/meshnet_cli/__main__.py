"""Where the program begins: `meshnet`, and `python -m meshnet_cli`, as `meshnet up` starts its children."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is being read in ends it quietly too."""
    try:
        from meshnet_cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
