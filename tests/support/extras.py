"""The extras, as settings.ini has them."""

from configparser import ConfigParser
from pathlib import Path

SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(Path(__file__).resolve().parents[2] / "settings.ini", encoding="utf-8")
# extra -> its requirements; of the package itself under an empty name
REQUIREMENTS = {
    key.removesuffix("requirements").removesuffix("_"): text.split()
    for key, text in SETTINGS["DEFAULT"].items()
    if key.endswith("requirements")
}
