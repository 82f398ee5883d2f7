"""What every host with weights says while it loads; the rest is its service's own affair."""

import msgspec


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """The model is being loaded: 0 to 1."""

    progress: float


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be loaded; the host ends. `permanent`: trying again with these settings is pointless."""

    message: str
    permanent: bool = False
