"""Stand-ins of a build have all that the interfaces they stand for ask."""

from dcompile.capture.services import BucketTimes, GradientBuckets
from dcompile.compiler.dry_run import NoBuckets


def test_buckets_without_reductions_have_the_whole_interface() -> None:
    asked = {name for name in {**vars(GradientBuckets), **BucketTimes.__annotations__} if not name.startswith("_")}
    assert {"last_run", "order", "times_ns"} <= asked <= {*dir(NoBuckets())}
