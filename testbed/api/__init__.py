"""What `import testbed` offers (docs/guide/python.md); the commands are made of these functions alone.

launching   `planned`: a topology planned on this host, and its run in this process
running     `up`, `attach`, `load`, `ps`, `down`: runs
handle      a run as an object: what it does, how to change it, how to end it
background  the process that controls a run in the background, as its starter sees it
controller  that process
notebook    a run as HTML, and kept up to date in a notebook
simulating  `simulate`: virtual time, in this process
studies     `sweep`, `agree`
results     `compare`, `report`, `draw`, `export`, `track`: what runs came to
machine     `doctor`, `calibrate`, images: this host
catalog     `rules`, `tasks`, `profiles`: what there is to choose from
starting    `new`, `examples`: something to begin with
traces      published traces
given       topologies as users give them
"""
