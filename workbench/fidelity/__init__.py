"""Is the credit right? Signals of recorded turns held against what the turns were worth.

states.py brings recorded states back to life, rolls.py plays on from them, truth.py makes values and advantages of the
outcomes; signals.py collects what methods say of the same turns, scores.py compares the two, measure.py does it for a
run, and frames.py keeps what was found.
"""
