"""The measured pictures lie in results/, where `moesaic reproduce` writes them; the site takes them from there."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent


def on_files(files, config):
    """Add results/*.png to the site's files."""
    for path in sorted((ROOT / "results").glob("*.png")):
        files.append(File(f"results/{path.name}", str(ROOT), config["site_dir"], use_directory_urls=False))
    return files


def on_page_markdown(markdown, page, config, files):
    """A page names them by their place in the repository, so that it reads well there too."""
    return markdown.replace("](../../results/", "](../results/")
