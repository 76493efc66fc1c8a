"""What `import testbed` offers (docs/python.md); the commands are made of the same functions.

running     `up`, `attach`, `load`
handle      a run as an object: what it does, how to change it, how to end it
background  the process that controls a run which Python, or `testbed up -d`, has started
notebook    a run as HTML, and kept up to date in a notebook
simulating  `simulate`: virtual time, in this process
studies     `sweep`
given       topologies as users give them
"""
