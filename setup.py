"""Hands settings.ini to setuptools. Everything about the package is written there, once."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(HERE / "settings.ini", encoding="utf-8")
settings = parser["DEFAULT"]


def words(key: str) -> list[str]:
    return settings.get(key, "").split()


def description() -> str:
    """README.md for a reader without the repository, which has no public address: pictures are left
    out, and of a relative link its text stays.
    """
    readme = HERE / "README.md"
    if not readme.exists():
        return settings["description"]
    text = re.sub(r"<!--.*?-->\s*", "", readme.read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=description(),
    long_description_content_type="text/markdown",
    author=settings["author"],
    keywords=words("keywords"),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Database",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=" + settings["min_python"],
    install_requires=words("requirements"),
    extras_require={
        key.removesuffix("_requirements"): words(key)
        for key in settings
        if key.endswith("_requirements")
    },
    entry_points={"console_scripts": words("console_scripts")},
    packages=find_packages(include=["kafka2pc", "kafka2pc.*"]),
    package_data={"kafka2pc": ["py.typed"]},
    py_modules=["pyspark_kafka2pc"],  # Spark looks for modules of such a name
    zip_safe=False,
)
