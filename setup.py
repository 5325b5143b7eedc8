"""Everything about the package is written once, in settings.ini. This file only hands it to
setuptools.
"""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(HERE / "settings.ini", encoding="utf-8")
settings = parser["DEFAULT"]
readme = HERE / "README.md"


def words(key: str) -> list[str]:
    return settings.get(key, "").split()


setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(
        readme.read_text(encoding="utf-8") if readme.exists() else settings["description"]
    ),
    long_description_content_type="text/markdown",
    author=settings["author"],
    author_email=settings["author_email"],
    url=settings["git_url"],
    license="Apache-2.0",
    keywords=words("keywords"),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: System :: Distributed Computing",
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
    py_modules=["pyspark_kafka2pc"],  # Spark looks for modules of such a name
    zip_safe=False,
)
