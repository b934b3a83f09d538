"""A small file system of the soak's own, so that it can be filled up and freed again."""

from __future__ import annotations

import subprocess
from pathlib import Path


def mounted(folder: Path, nbytes: int) -> tuple[Path, str]:
    """Mount a fresh ext4 of `nbytes`, from an image in `folder`, and return its place and no reason; else `folder` and
    why not.

    O_DIRECT there goes through the loop device to the image.
    """
    image, place = folder / "drive.img", folder / "drive"
    place.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(nbytes)
        for command in (
            ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)],
            ["mount", "-o", "loop", str(image), str(place)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return folder, f"{command[0]}: {done.stderr.strip().splitlines()[-1:]}"
    except FileNotFoundError as error:
        return folder, str(error)
    return place, ""


def unmount(folder: Path) -> None:
    """Undo `mounted`."""
    place, image = folder / "drive", folder / "drive.img"
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)
    if place.exists():
        place.rmdir()
    image.unlink(missing_ok=True)
