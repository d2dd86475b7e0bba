"""What a bundle is worth, for people: one HTML file, and a summary on the terminal, from the same data."""

from rmsnorm_deploy.report.html import write_html
from rmsnorm_deploy.report.terminal import print_summary

__all__ = ["print_summary", "write_html"]
