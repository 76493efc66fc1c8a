"""Functions and classes of `import testbed` (docs/guide/python.md). The commands call only
these functions.

launching       `plan_run`: plan a topology on this host; run the plan in this process
reading         find and load finished runs
running         `up`, `attach`, `load`, `ps`, `down`: start, find, read and end runs
handle          `RunHandle`: a run as an object, to observe, change and end it
background      start and end the process that controls a run in the background
run_process     entry point of the process that controls a run in the background
notebook        show a run as HTML, live in a notebook
simulating      `simulate`: a run in virtual time, in this process
studies         `sweep`, `agree`: many runs
results         `compare`, `report`, `draw`, `export`, `track`: results of runs
machine         `doctor`, `calibrate`, ...: checks, speed and images of this host
catalog         `rules`, `selections`, `tasks`, `profiles`: the built-in choices
templates       `new`, `examples`: files to begin with
traces          published traces
topology_input  conversion of topologies that are passed from Python
"""
