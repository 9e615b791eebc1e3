"""Local steps: groups of ranks train by themselves and exchange outer updates now and then."""
