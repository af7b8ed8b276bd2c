"""`make image-size` runs this in each image: what it holds beyond its base, largest first."""

import sys
from pathlib import Path

LISTED_BYTES = 10_000_000


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links count nothing."""
    if path.is_symlink():
        return 0
    return path.stat().st_size if path.is_file() else sum(map(size_bytes, path.iterdir()))


total_bytes = sum(size_bytes(Path(folder)) for folder in ("/opt", "/home", "/srv"))
print(f"{sys.argv[1]}: {total_bytes / 1e6:,.0f} MB")
for packages in Path("/opt/lenet-serve/lib").glob("*/site-packages"):
    sizes = {path.name: size_bytes(path) for path in packages.iterdir() if path.name != "nvidia"}
    for library in packages.glob("nvidia/*/lib/*"):
        sizes[library.name] = size_bytes(library)
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if sizes[name] >= LISTED_BYTES:
            print(f"  {sizes[name] / 1e6:8,.1f} MB  {name}")
    rest_bytes = total_bytes - sum(size for size in sizes.values() if size >= LISTED_BYTES)
    print(f"  {rest_bytes / 1e6:8,.1f} MB  everything else")
