"""Packs: a run or a sweep as one archive (a zip file) that runs again on another machine.

`contents` decides which files a pack has, `archive` writes and unpacks the archive, `trust` says what in
an unpacked pack would run foreign programs. `layout` has the index of a pack, `crate` its description
for archives of research data (RO-Crate).
"""
