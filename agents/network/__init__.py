"""Parts of the policy: encoders of observations, cores, heads of actions."""
