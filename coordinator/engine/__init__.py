"""A model that stays loaded, for every door that asks it: requests checked, answers streamed, its state told."""
