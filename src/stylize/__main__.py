"""`python -m stylize` is `stylize`."""

from stylize.cli import main

if __name__ == "__main__":
    main()
