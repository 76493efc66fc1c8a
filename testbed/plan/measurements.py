"""Measurements on a host for a run. The measurements are stored next to the run's topology, so that the
run can be repeated with the same figures."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from testbed.topology import Virtual, validation_errors, yamlfile
from testbed.topology.fields import Cpu, Model

FILE = "measured.yaml"


class Measurements(Model):
    cpu: dict[str, Cpu] = Field(
        default={},
        description="Group, or drawn device -> CPU share, in cores of that host, that is as fast as the "
        "profile",
    )
    virtual: Virtual = Field(default=Virtual(), description="Costs for virtual time")

    @classmethod
    def read(cls, folder: Path) -> Measurements:
        """Raises BadInputError if the file is invalid."""
        path = folder / FILE
        return validation_errors.validate(cls, yamlfile.read(path)) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        if self != Measurements():
            text = yamlfile.write(self.model_dump(mode="json", exclude_defaults=True))
            path.write_text(text, encoding="utf-8")
