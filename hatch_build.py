"""Complete the metadata by addresses of the repository, which pyproject.toml has in one place (`[tool.hatch.metadata.hooks.custom]`)."""

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryAddress(MetadataHookInterface):
    """Make the project URLs and the links of the long description absolute."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        metadata["urls"] = {label: repository + path for label, path in self.config["urls"].items()}
        readme = metadata["readme"]  # hatch-fancy-pypi-readme has made it: hooks run in the order of pyproject.toml
        readme["text"] = readme["text"].replace("@REPOSITORY@", repository)
