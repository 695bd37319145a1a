"""The measured pictures lie in results/, where `moesaic reproduce` writes them; the site takes them from there.

A picture with a second one for narrow screens beside it (NAME.png, NAME.narrow.png) is shown as a <picture> of both.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Below this width of the window the column is too narrow for the wide picture.
NARROW = 600
_IMAGE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<path>[^"]+)\.png"(?P<rest>[^>]*)>')


def on_files(files, config):
    """Add results/*.png to the site's files."""
    for path in sorted((ROOT / "results").glob("*.png")):
        files.append(File(f"results/{path.name}", str(ROOT), config["site_dir"], use_directory_urls=False))
    return files


def on_page_markdown(markdown, page, config, files):
    """A page names them by their place in the repository, so that it reads well there too."""
    return markdown.replace("](../../results/", "](../results/")


def on_page_content(html, page, config, files):
    """The narrow picture on narrow screens, where there is one."""
    return pictures(html, {file.src_uri for file in files})


def pictures(html, names):
    """Wrap each image that has a narrow sibling among ``names``."""

    def both(match):
        name = match["path"].rsplit("/", 1)[-1]
        if not any(known.endswith(f"/{name}.narrow.png") for known in names):
            return match[0]
        source = f'<source media="(max-width: {NARROW}px)" srcset="{match["path"]}.narrow.png">'
        return f"<picture>{source}{match[0]}</picture>"

    return _IMAGE.sub(both, html)
