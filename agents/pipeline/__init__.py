"""Steps that an update passes between local training and the aggregation rule."""
