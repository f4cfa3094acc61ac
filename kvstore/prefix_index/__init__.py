"""The shared map prefix hash → replicas: events, the replica's publisher, the Gateway's mirror, Redis."""
