"""`python -m dcompile`: report this machine's tools and devices, and whether a compilation works."""

from dcompile.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
