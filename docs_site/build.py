"""`python -m docs_site.build`: the site in `build/site`; a warning, such as a link to nothing, is an error.

The pages are laid out under `build/docs-source` as they lie in the repository, so that links between them are the same
here and there, with the pages that `reference` makes from the code beside them. What the site looks like is in
`mkdocs.yml`. Knows nothing of what the pages say.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from docs_site import reference

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile")
FOLDERS = ("docs", "deploy")


def lay_out(root: Path, target: Path) -> None:
    """Put all pages under ``target``, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in ROOT_PAGES:
        shutil.copyfile(root / name, target / name)
    for folder in FOLDERS:
        shutil.copytree(root / folder, target / folder)
    for name, text in reference.pages().items():
        page = target / "docs" / "reference" / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")


def with_all_pages(settings: str, source: Path) -> str:
    """``settings`` with every record of ``docs/adr`` in the navigation, and every page that it does not name yet."""
    records = [f"          - {page.relative_to(source)}" for page in sorted((source / "docs" / "adr").glob("*.md"))]
    pages = [
        str(page.relative_to(source)) for page in sorted((source / "docs").rglob("*.md")) if page.parent.name != "adr"
    ]
    others = [f"      - {page}" for page in pages if f" {page}\n" not in settings]
    decisions = "\n".join(["      - Decisions:", *records])
    return settings.replace("      # DECISIONS", decisions).replace("      # OTHER PAGES", "\n".join(others))


def build(root: Path, work: Path) -> subprocess.CompletedProcess[str]:
    """Build the pages of ``root`` into ``work/site``; the exit code is 0 only without a warning."""
    lay_out(root, work / "docs-source")
    settings = (root / "mkdocs.yml").read_text(encoding="utf-8")
    (work / "mkdocs.yml").write_text(with_all_pages(settings, work / "docs-source"), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(work / "mkdocs.yml")],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation; warnings are errors.")
    parser.add_argument("--work", type=Path, default=ROOT / "build", help="where the site is made")
    work: Path = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    done = build(ROOT, work.resolve())
    if done.returncode:
        # Its last lines are a traceback that says only that --strict was asked for.
        sys.stderr.write(done.stdout + done.stderr.split("Traceback (most recent call last)")[0])
        sys.exit(1)
    print(f"built {work / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()
