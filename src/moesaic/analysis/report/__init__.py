"""The report: sections that parts register, one self-contained page, PNG files."""

from moesaic.analysis.report import routing_sections, text_section
from moesaic.analysis.report.page import render_page, write_report
from moesaic.analysis.report.sections import Section, Subject, build_sections, register_section

__all__ = [
    "Section",
    "Subject",
    "build_sections",
    "register_section",
    "render_page",
    "routing_sections",
    "text_section",
    "write_report",
]
