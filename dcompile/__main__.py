"""`python -m dcompile`: what a compilation finds on this machine."""

from dcompile.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
