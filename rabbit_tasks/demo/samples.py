"""Images of several formats and sizes, and three files that no thumbnail can be made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Which of them the demo's flaky disk fails at, their names decide.
IMAGES: Final = {
    "dunes.jpg": (1600, 1200),
    "harbour.jpg": (2400, 1350),
    "portrait.jpg": (900, 1400),
    "poster.png": (1200, 1800),
    "icon.png": (48, 48),
    "map.gif": (320, 200),
    "banner.webp": (2000, 400),
    "scan.tiff": (1240, 1754),
    "screen.bmp": (1024, 768),
}


@dataclass(frozen=True)
class Samples:
    """Files in a folder, and what the truncated one should have been."""

    paths: list[Path]
    truncated: Path
    whole: bytes

    def repair(self) -> None:
        """Upload the truncated file again, in full this time."""
        self.truncated.write_bytes(self.whole)


def make(folder: Path) -> Samples:
    """Draw the images, and put the three bad ones beside them."""
    for name, size in IMAGES.items():
        _draw(folder / name, size)
    truncated, empty = folder / "truncated-photo.jpg", folder / "zero-byte.png"
    _draw(truncated, (1200, 900))
    whole = truncated.read_bytes()
    truncated.write_bytes(whole[: len(whole) // 2])
    empty.touch()
    paths = [*(folder / name for name in IMAGES), truncated, empty, folder / "missing.jpg"]
    return Samples(paths, truncated, whole)


def images_in(folder: Path) -> list[Path]:
    """The files of a folder that Pillow reads as images, by their names."""
    from PIL import Image

    readable = {
        ending
        for ending, form in Image.registered_extensions().items()
        if form in Image.OPEN and Image.MIME.get(form, "").startswith("image/")
    }
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in readable)


def _draw(path: Path, size: tuple[int, int]) -> None:
    """A sky of three gradients, each another way round."""
    from PIL import Image, ImageOps

    light = Image.radial_gradient("L").resize(size)
    slope = Image.linear_gradient("L").resize(size)
    Image.merge("RGB", (ImageOps.invert(light), slope, light)).save(path)
