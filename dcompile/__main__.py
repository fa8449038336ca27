"""`python -m dcompile`: report this machine's tools and devices for compilation."""

from dcompile.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
