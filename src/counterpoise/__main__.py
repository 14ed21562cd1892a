"""``python -m counterpoise`` is ``counterpoise``."""

from counterpoise.cli import main

if __name__ == "__main__":
    main()
