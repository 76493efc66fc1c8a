"""Packs: a run or a sweep as one archive (a zip file) that runs again on another machine.

`contents` decides which files a pack has, `archive` writes and unpacks the archive, `layout` has its
index and its description for archives of research data (RO-Crate). Its topologies are read within
`testbed.topology.yamlfile.Boundary`: no file outside of the pack, no programs unless trusted.
"""
