"""Fetches JavaScript and font of the web page and its tests, pinned by version and integrity.

``make vendor`` runs it; the result is part of the repository, so that nothing is fetched to run, build
or test. To take another version, change ``version`` and ``integrity`` below; ``npm view NAME
dist.integrity`` prints the latter.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "src" / "ravnest" / "server" / "web" / "static" / "vendor"
TESTS = ROOT / "tests" / "browser" / "vendor"
LIST = "vendored.json"


@dataclass(frozen=True)
class Package:
    """A package of npm, and which of its files are copied."""

    name: str
    version: str
    integrity: str
    files: dict[str, str]
    """Names of the copies by the paths in the package."""
    licence: str
    """Name of the licence."""
    target: Path = PAGE


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
        "MIT",
    ),
    Package(
        "htm",
        "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.module.js": "htm.js"},
        "Apache-2.0",
    ),
    Package(
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.esm.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
        "MIT",
    ),
    Package(
        "@fontsource-variable/inter",
        "5.3.0",
        "sha512-OupL48va4JNofb97w6NYeF9S7W/kHNKM0Er8Dem5nqi4jeOLrVJDoE8tZEpnMJmtkvNbB1EIPPwHcdkF6b1oUA==",
        {"files/inter-latin-wght-normal.woff2": "inter.woff2"},
        "OFL-1.1",
    ),
    Package(
        "axe-core",
        "4.14.0",
        "sha512-9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ==",
        {"axe.min.js": "axe.js"},
        "MPL-2.0",
        TESTS,
    ),
)


def main() -> None:
    """Write all copies, their licences, and a list with their digests."""
    for target in (PAGE, TESTS):
        target.mkdir(parents=True, exist_ok=True)
        own = [each for each in PACKAGES if each.target == target]
        listed = [_copied(package) for package in own]
        (target / LIST).write_text(json.dumps(listed, indent=2) + "\n")


def _copied(package: Package) -> dict[str, object]:
    """Copy the files of a package; return its entry in the list."""
    with tempfile.TemporaryDirectory() as folder:
        archive = _fetched(package, Path(folder))
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        source = Path(folder) / "package"
        digests = {}
        for path, name in package.files.items():
            content = (source / path).read_bytes()
            if path.endswith((".js", ".mjs", ".css")):
                content = _plain_text(content.decode()).encode()
            (package.target / name).write_bytes(content)
            digests[name] = hashlib.sha256(content).hexdigest()
        licence = next(each for each in sorted(source.iterdir()) if each.name.startswith("LICENSE"))
        name = package.name.rpartition("/")[2]
        (package.target / f"{name}.LICENSE").write_text(licence.read_text())
    return {
        "name": package.name,
        "version": package.version,
        "licence": package.licence,
        "integrity": package.integrity,
        "sha256": digests,
    }


def _plain_text(text: str) -> str:
    """Return a script or style as browsers can use it: they do not resolve the names of packages."""
    text = text.replace('from"preact"', 'from"./preact.js"')
    return "\n".join(line for line in text.splitlines() if "sourceMappingURL" not in line) + "\n"


def _fetched(package: Package, folder: Path) -> Path:
    """Return the archive of a package; raise ``ValueError`` if it is not the pinned one."""
    command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    archive = next(folder.glob("*.tgz"))
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != package.integrity:
        raise ValueError(f"{package.name} {package.version} is not the pinned one: sha512-{digest}")
    return archive


if __name__ == "__main__":
    main()
