from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_UINT32: _ClassVar[DType]

class CacheKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_UNSPECIFIED: _ClassVar[CacheKind]
    CACHE_FULL: _ClassVar[CacheKind]
    CACHE_ROTATING: _ClassVar[CacheKind]
    CACHE_INT8: _ClassVar[CacheKind]
    CACHE_INT4: _ClassVar[CacheKind]

class Conditioning(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONDITIONING_NONE: _ClassVar[Conditioning]
    CONDITIONING_EXACT: _ClassVar[Conditioning]
    CONDITIONING_TOP: _ClassVar[Conditioning]

class Medium(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIUM_UNSPECIFIED: _ClassVar[Medium]
    MEDIUM_LOOPBACK: _ClassVar[Medium]
    MEDIUM_THUNDERBOLT: _ClassVar[Medium]
    MEDIUM_ETHERNET: _ClassVar[Medium]
    MEDIUM_WIFI: _ClassVar[Medium]
    MEDIUM_TUNNEL: _ClassVar[Medium]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_TCP: _ClassVar[Transport]
    TRANSPORT_TLS: _ClassVar[Transport]
    TRANSPORT_GRPC: _ClassVar[Transport]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_UINT32: DType
CACHE_UNSPECIFIED: CacheKind
CACHE_FULL: CacheKind
CACHE_ROTATING: CacheKind
CACHE_INT8: CacheKind
CACHE_INT4: CacheKind
CONDITIONING_NONE: Conditioning
CONDITIONING_EXACT: Conditioning
CONDITIONING_TOP: Conditioning
MEDIUM_UNSPECIFIED: Medium
MEDIUM_LOOPBACK: Medium
MEDIUM_THUNDERBOLT: Medium
MEDIUM_ETHERNET: Medium
MEDIUM_WIFI: Medium
MEDIUM_TUNNEL: Medium
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_TCP: Transport
TRANSPORT_TLS: Transport
TRANSPORT_GRPC: Transport

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "node", "memory_bytes", "mlx_version", "mlx_lm_version", "incarnation", "configuration", "certificate_expires", "started")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MLX_VERSION_FIELD_NUMBER: _ClassVar[int]
    MLX_LM_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    memory_bytes: int
    mlx_version: str
    mlx_lm_version: str
    incarnation: str
    configuration: Configuration
    certificate_expires: int
    started: int
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., mlx_version: _Optional[str] = ..., mlx_lm_version: _Optional[str] = ..., incarnation: _Optional[str] = ..., configuration: _Optional[_Union[Configuration, _Mapping]] = ..., certificate_expires: _Optional[int] = ..., started: _Optional[int] = ...) -> None: ...

class Configuration(_message.Message):
    __slots__ = ("model", "layers", "context", "others", "name")
    class OthersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    model: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    context: int
    others: _containers.ScalarMap[str, str]
    name: str
    def __init__(self, model: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., context: _Optional[int] = ..., others: _Optional[_Mapping[str, str]] = ..., name: _Optional[str] = ...) -> None: ...

class Coordinator(_message.Message):
    __slots__ = ("id", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("config", "tokenizer", "tensors")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    config: str
    tokenizer: str
    tensors: str
    def __init__(self, config: _Optional[str] = ..., tokenizer: _Optional[str] = ..., tensors: _Optional[str] = ...) -> None: ...

class Contents(_message.Message):
    __slots__ = ("headers", "marks", "hub_hashes")
    class HubHashesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    HUB_HASHES_FIELD_NUMBER: _ClassVar[int]
    headers: bytes
    marks: bytes
    hub_hashes: _containers.ScalarMap[str, str]
    def __init__(self, headers: _Optional[bytes] = ..., marks: _Optional[bytes] = ..., hub_hashes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("model", "fingerprint", "start", "end", "num_layers", "dtype", "contents", "coordinator", "memory_bytes", "digests", "is_drafter", "embeds_last")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_LAST_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: Fingerprint
    start: int
    end: int
    num_layers: int
    dtype: DType
    contents: Contents
    coordinator: Coordinator
    memory_bytes: int
    digests: _containers.ScalarMap[int, str]
    is_drafter: bool
    embeds_last: bool
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., num_layers: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., contents: _Optional[_Union[Contents, _Mapping]] = ..., coordinator: _Optional[_Union[Coordinator, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., digests: _Optional[_Mapping[int, str]] = ..., is_drafter: _Optional[bool] = ..., embeds_last: _Optional[bool] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("phase", "done", "total")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    phase: str
    done: int
    total: int
    def __init__(self, phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("epoch", "stage", "successor", "successor_name", "loaded", "coordinator", "predecessor_name", "num_stages", "check_finite", "successor_fallbacks", "drafter", "returns_segments", "num_features", "prefix_bytes", "returns_rows")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_NAME_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FINITE_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    RETURNS_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETURNS_ROWS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage: int
    successor: str
    successor_name: str
    loaded: LoadRequest
    coordinator: Coordinator
    predecessor_name: str
    num_stages: int
    check_finite: bool
    successor_fallbacks: _containers.RepeatedScalarFieldContainer[str]
    drafter: LoadRequest
    returns_segments: bool
    num_features: int
    prefix_bytes: int
    returns_rows: bool
    def __init__(self, epoch: _Optional[int] = ..., stage: _Optional[int] = ..., successor: _Optional[str] = ..., successor_name: _Optional[str] = ..., loaded: _Optional[_Union[LoadRequest, _Mapping]] = ..., coordinator: _Optional[_Union[Coordinator, _Mapping]] = ..., predecessor_name: _Optional[str] = ..., num_stages: _Optional[int] = ..., check_finite: _Optional[bool] = ..., successor_fallbacks: _Optional[_Iterable[str]] = ..., drafter: _Optional[_Union[LoadRequest, _Mapping]] = ..., returns_segments: _Optional[bool] = ..., num_features: _Optional[int] = ..., prefix_bytes: _Optional[int] = ..., returns_rows: _Optional[bool] = ...) -> None: ...

class ResultsRequest(_message.Message):
    __slots__ = ("epoch", "coordinator_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    coordinator_id: str
    def __init__(self, epoch: _Optional[int] = ..., coordinator_id: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("result", "draining", "segments", "data", "checksum")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    result: Result
    draining: Draining
    segments: Segments
    data: bytes
    checksum: int
    def __init__(self, result: _Optional[_Union[Result, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., segments: _Optional[_Union[Segments, _Mapping]] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class Segments(_message.Message):
    __slots__ = ("epoch", "step", "slot", "segments")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    slot: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., slot: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("base", "cache", "part", "tensors", "is_output", "num_keys", "length")
    BASE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    IS_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    base: int
    cache: int
    part: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    is_output: bool
    num_keys: int
    length: int
    def __init__(self, base: _Optional[int] = ..., cache: _Optional[int] = ..., part: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., is_output: _Optional[bool] = ..., num_keys: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("name", "begin", "end", "first_layer", "last_layer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    begin: int
    end: int
    first_layer: int
    last_layer: int
    def __init__(self, name: _Optional[bytes] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ...) -> None: ...

class FilePart(_message.Message):
    __slots__ = ("piece", "data")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    piece: Piece
    data: bytes
    def __init__(self, piece: _Optional[_Union[Piece, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("slot", "piece", "prefix_hash")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    slot: int
    piece: Piece
    prefix_hash: int
    def __init__(self, slot: _Optional[int] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., prefix_hash: _Optional[int] = ...) -> None: ...

class PrefixesRequest(_message.Message):
    __slots__ = ("remove", "remove_named")
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_NAMED_FIELD_NUMBER: _ClassVar[int]
    remove: bool
    remove_named: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, remove: _Optional[bool] = ..., remove_named: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefixesReply(_message.Message):
    __slots__ = ("pieces", "bytes", "used")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    bytes: int
    used: int
    def __init__(self, pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., bytes: _Optional[int] = ..., used: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Part(_message.Message):
    __slots__ = ("number", "frame", "data", "checksum")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    number: int
    frame: Frame
    data: bytes
    checksum: int
    def __init__(self, number: _Optional[int] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: int
    def __init__(self, frames: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("epoch", "step", "closed", "opened", "windows", "hidden", "timings", "stays", "failures", "stores")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    closed: _containers.RepeatedScalarFieldContainer[int]
    opened: _containers.RepeatedCompositeFieldContainer[Opening]
    windows: _containers.RepeatedCompositeFieldContainer[Window]
    hidden: Tensor
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    stays: bool
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    stores: _containers.RepeatedCompositeFieldContainer[Store]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., closed: _Optional[_Iterable[int]] = ..., opened: _Optional[_Iterable[_Union[Opening, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[Window, _Mapping]]] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., stays: _Optional[bool] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., stores: _Optional[_Iterable[_Union[Store, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("slot", "kind", "message", "node")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    kind: str
    message: str
    node: str
    def __init__(self, slot: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("slot", "sampling", "cache", "fork_of", "drafted", "snapshots")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sampling: Sampling
    cache: Cache
    fork_of: int
    drafted: bool
    snapshots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache: _Optional[_Union[Cache, _Mapping]] = ..., fork_of: _Optional[int] = ..., drafted: _Optional[bool] = ..., snapshots: _Optional[_Iterable[int]] = ...) -> None: ...

class Cache(_message.Message):
    __slots__ = ("kind", "size", "keep")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    kind: CacheKind
    size: int
    keep: int
    def __init__(self, kind: _Optional[_Union[CacheKind, str]] = ..., size: _Optional[int] = ..., keep: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "grammar", "repetition_context_size", "presence_context_size", "frequency_context_size", "xtc_probability", "xtc_threshold", "xtc_special_tokens", "top_n_sigma", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_breakers", "min_tokens", "begins", "ends")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    REPETITION_CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    XTC_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    XTC_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    XTC_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    DRY_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    DRY_BASE_FIELD_NUMBER: _ClassVar[int]
    DRY_ALLOWED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRY_PENALTY_LAST_N_FIELD_NUMBER: _ClassVar[int]
    DRY_BREAKERS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    grammar: Grammar
    repetition_context_size: int
    presence_context_size: int
    frequency_context_size: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_n_sigma: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_breakers: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    begins: int
    ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., repetition_context_size: _Optional[int] = ..., presence_context_size: _Optional[int] = ..., frequency_context_size: _Optional[int] = ..., xtc_probability: _Optional[float] = ..., xtc_threshold: _Optional[float] = ..., xtc_special_tokens: _Optional[_Iterable[int]] = ..., top_n_sigma: _Optional[float] = ..., dry_multiplier: _Optional[float] = ..., dry_base: _Optional[float] = ..., dry_allowed_length: _Optional[int] = ..., dry_penalty_last_n: _Optional[int] = ..., dry_breakers: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., begins: _Optional[int] = ..., ends: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("text", "begins", "eos", "owner")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    EOS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    text: str
    begins: int
    eos: _containers.RepeatedScalarFieldContainer[int]
    owner: str
    def __init__(self, text: _Optional[str] = ..., begins: _Optional[int] = ..., eos: _Optional[_Iterable[int]] = ..., owner: _Optional[str] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("slot", "base", "prefix_hash", "tokens", "wanted", "masks", "guessed", "positions", "targets", "to_draft", "canvas", "canvas_step", "temperature", "conditioning", "soft", "pooled", "canvas_first", "stored", "upcoming", "snapshots")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    GUESSED_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TO_DRAFT_FIELD_NUMBER: _ClassVar[int]
    CANVAS_FIELD_NUMBER: _ClassVar[int]
    CANVAS_STEP_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    CONDITIONING_FIELD_NUMBER: _ClassVar[int]
    SOFT_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    CANVAS_FIRST_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    UPCOMING_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    base: int
    prefix_hash: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    wanted: int
    masks: int
    guessed: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    to_draft: int
    canvas: _containers.RepeatedScalarFieldContainer[int]
    canvas_step: int
    temperature: float
    conditioning: Conditioning
    soft: Soft
    pooled: int
    canvas_first: int
    stored: bytes
    upcoming: _containers.RepeatedScalarFieldContainer[bytes]
    snapshots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., base: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., wanted: _Optional[int] = ..., masks: _Optional[int] = ..., guessed: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ..., to_draft: _Optional[int] = ..., canvas: _Optional[_Iterable[int]] = ..., canvas_step: _Optional[int] = ..., temperature: _Optional[float] = ..., conditioning: _Optional[_Union[Conditioning, str]] = ..., soft: _Optional[_Union[Soft, _Mapping]] = ..., pooled: _Optional[int] = ..., canvas_first: _Optional[int] = ..., stored: _Optional[bytes] = ..., upcoming: _Optional[_Iterable[bytes]] = ..., snapshots: _Optional[_Iterable[int]] = ...) -> None: ...

class Soft(_message.Message):
    __slots__ = ("slot", "conditioning", "rows", "ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CONDITIONING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    conditioning: Conditioning
    rows: bytes
    ids: bytes
    def __init__(self, slot: _Optional[int] = ..., conditioning: _Optional[_Union[Conditioning, str]] = ..., rows: _Optional[bytes] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("stage", "received", "taken", "started", "computed", "sampled", "drafted", "sent", "scratch_bytes")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    received: int
    taken: int
    started: int
    computed: int
    sampled: int
    drafted: int
    sent: int
    scratch_bytes: int
    def __init__(self, stage: _Optional[int] = ..., received: _Optional[int] = ..., taken: _Optional[int] = ..., started: _Optional[int] = ..., computed: _Optional[int] = ..., sampled: _Optional[int] = ..., drafted: _Optional[int] = ..., sent: _Optional[int] = ..., scratch_bytes: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("epoch", "step", "samples", "timings", "guesses", "failures", "scores", "drafter_failure", "soft", "pooled")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FAILURE_FIELD_NUMBER: _ClassVar[int]
    SOFT_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    guesses: _containers.RepeatedCompositeFieldContainer[Sample]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    drafter_failure: str
    soft: _containers.RepeatedCompositeFieldContainer[Soft]
    pooled: _containers.RepeatedCompositeFieldContainer[Pooled]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., guesses: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., drafter_failure: _Optional[str] = ..., soft: _Optional[_Iterable[_Union[Soft, _Mapping]]] = ..., pooled: _Optional[_Iterable[_Union[Pooled, _Mapping]]] = ...) -> None: ...

class Pooled(_message.Message):
    __slots__ = ("slot", "rows", "sum")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    slot: int
    rows: int
    sum: bytes
    def __init__(self, slot: _Optional[int] = ..., rows: _Optional[int] = ..., sum: _Optional[bytes] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("slot", "token", "logprob", "alternatives", "entropy", "likeliest")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    LIKELIEST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token: int
    logprob: float
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    entropy: float
    likeliest: int
    def __init__(self, slot: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., entropy: _Optional[float] = ..., likeliest: _Optional[int] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("slot", "token", "logprob", "is_greedy", "alternatives")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    IS_GREEDY_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token: int
    logprob: float
    is_greedy: bool
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, slot: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., is_greedy: _Optional[bool] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "clock", "step", "busy_s", "slots", "cache_bytes", "weight_bytes", "peak_memory_bytes", "sent_bytes", "active_memory_bytes", "cached_memory_bytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    node: str
    clock: int
    step: int
    busy_s: float
    slots: int
    cache_bytes: int
    weight_bytes: int
    peak_memory_bytes: int
    sent_bytes: int
    active_memory_bytes: int
    cached_memory_bytes: int
    def __init__(self, node: _Optional[str] = ..., clock: _Optional[int] = ..., step: _Optional[int] = ..., busy_s: _Optional[float] = ..., slots: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., active_memory_bytes: _Optional[int] = ..., cached_memory_bytes: _Optional[int] = ...) -> None: ...

class CompileReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DigestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DigestReply(_message.Message):
    __slots__ = ("digests",)
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.ScalarMap[str, str]
    def __init__(self, digests: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MeasureRequest(_message.Message):
    __slots__ = ("model", "anew")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    model: LoadRequest
    anew: bool
    def __init__(self, model: _Optional[_Union[LoadRequest, _Mapping]] = ..., anew: _Optional[bool] = ...) -> None: ...

class RowTimes(_message.Message):
    __slots__ = ("rows", "ms")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    ms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., ms: _Optional[_Iterable[float]] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("kinds", "head", "gbps")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    GBPS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedCompositeFieldContainer[RowTimes]
    head: RowTimes
    gbps: float
    def __init__(self, kinds: _Optional[_Iterable[_Union[RowTimes, _Mapping]]] = ..., head: _Optional[_Union[RowTimes, _Mapping]] = ..., gbps: _Optional[float] = ...) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("node", "addresses", "examined", "listeners")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    node: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    examined: bool
    listeners: _containers.RepeatedCompositeFieldContainer[Listener]
    def __init__(self, node: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., examined: _Optional[bool] = ..., listeners: _Optional[_Iterable[_Union[Listener, _Mapping]]] = ...) -> None: ...

class LinkReply(_message.Message):
    __slots__ = ("rtt_ms", "bytes_per_s", "way", "lines")
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    rtt_ms: float
    bytes_per_s: float
    way: Way
    lines: _containers.RepeatedCompositeFieldContainer[Line]
    def __init__(self, rtt_ms: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., way: _Optional[_Union[Way, _Mapping]] = ..., lines: _Optional[_Iterable[_Union[Line, _Mapping]]] = ...) -> None: ...

class ProbePart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("only_time",)
    ONLY_TIME_FIELD_NUMBER: _ClassVar[int]
    only_time: bool
    def __init__(self, only_time: _Optional[bool] = ...) -> None: ...

class Facts(_message.Message):
    __slots__ = ("node", "system", "system_version", "chip", "memory_bytes", "budget_bytes", "working_set_bytes", "wired_limit_mb", "cache_folder", "free_disk_bytes", "versions", "code", "certificate_expires", "time", "power", "firewall", "interfaces", "thunderbolt", "rdma", "rdma_devices", "unread", "is_outdated")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHIP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKING_SET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRED_LIMIT_MB_FIELD_NUMBER: _ClassVar[int]
    CACHE_FOLDER_FIELD_NUMBER: _ClassVar[int]
    FREE_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    FIREWALL_FIELD_NUMBER: _ClassVar[int]
    INTERFACES_FIELD_NUMBER: _ClassVar[int]
    THUNDERBOLT_FIELD_NUMBER: _ClassVar[int]
    RDMA_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    IS_OUTDATED_FIELD_NUMBER: _ClassVar[int]
    node: str
    system: str
    system_version: str
    chip: str
    memory_bytes: int
    budget_bytes: int
    working_set_bytes: int
    wired_limit_mb: int
    cache_folder: str
    free_disk_bytes: int
    versions: _containers.ScalarMap[str, str]
    code: str
    certificate_expires: int
    time: int
    power: Power
    firewall: str
    interfaces: _containers.RepeatedCompositeFieldContainer[Interface]
    thunderbolt: _containers.RepeatedCompositeFieldContainer[ThunderboltPort]
    rdma: str
    rdma_devices: _containers.RepeatedScalarFieldContainer[str]
    unread: _containers.RepeatedScalarFieldContainer[str]
    is_outdated: bool
    def __init__(self, node: _Optional[str] = ..., system: _Optional[str] = ..., system_version: _Optional[str] = ..., chip: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., working_set_bytes: _Optional[int] = ..., wired_limit_mb: _Optional[int] = ..., cache_folder: _Optional[str] = ..., free_disk_bytes: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ..., code: _Optional[str] = ..., certificate_expires: _Optional[int] = ..., time: _Optional[int] = ..., power: _Optional[_Union[Power, _Mapping]] = ..., firewall: _Optional[str] = ..., interfaces: _Optional[_Iterable[_Union[Interface, _Mapping]]] = ..., thunderbolt: _Optional[_Iterable[_Union[ThunderboltPort, _Mapping]]] = ..., rdma: _Optional[str] = ..., rdma_devices: _Optional[_Iterable[str]] = ..., unread: _Optional[_Iterable[str]] = ..., is_outdated: _Optional[bool] = ...) -> None: ...

class Power(_message.Message):
    __slots__ = ("sleep_minutes", "is_kept_awake", "is_on_battery", "is_saving", "may_nap")
    SLEEP_MINUTES_FIELD_NUMBER: _ClassVar[int]
    IS_KEPT_AWAKE_FIELD_NUMBER: _ClassVar[int]
    IS_ON_BATTERY_FIELD_NUMBER: _ClassVar[int]
    IS_SAVING_FIELD_NUMBER: _ClassVar[int]
    MAY_NAP_FIELD_NUMBER: _ClassVar[int]
    sleep_minutes: int
    is_kept_awake: bool
    is_on_battery: bool
    is_saving: bool
    may_nap: bool
    def __init__(self, sleep_minutes: _Optional[int] = ..., is_kept_awake: _Optional[bool] = ..., is_on_battery: _Optional[bool] = ..., is_saving: _Optional[bool] = ..., may_nap: _Optional[bool] = ...) -> None: ...

class Interface(_message.Message):
    __slots__ = ("name", "port", "medium", "addresses", "mtu", "is_active")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MTU_FIELD_NUMBER: _ClassVar[int]
    IS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    port: str
    medium: Medium
    addresses: _containers.RepeatedScalarFieldContainer[str]
    mtu: int
    is_active: bool
    def __init__(self, name: _Optional[str] = ..., port: _Optional[str] = ..., medium: _Optional[_Union[Medium, str]] = ..., addresses: _Optional[_Iterable[str]] = ..., mtu: _Optional[int] = ..., is_active: _Optional[bool] = ...) -> None: ...

class ThunderboltPort(_message.Message):
    __slots__ = ("name", "gbit", "is_connected", "id", "peer", "peer_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GBIT_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    gbit: float
    is_connected: bool
    id: str
    peer: str
    peer_id: str
    def __init__(self, name: _Optional[str] = ..., gbit: _Optional[float] = ..., is_connected: _Optional[bool] = ..., id: _Optional[str] = ..., peer: _Optional[str] = ..., peer_id: _Optional[str] = ...) -> None: ...

class ListenRequest(_message.Message):
    __slots__ = ("transport", "address")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transport: Transport
    address: str
    def __init__(self, transport: _Optional[_Union[Transport, str]] = ..., address: _Optional[str] = ...) -> None: ...

class Listener(_message.Message):
    __slots__ = ("transport", "port", "token")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    transport: Transport
    port: int
    token: bytes
    def __init__(self, transport: _Optional[_Union[Transport, str]] = ..., port: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class Way(_message.Message):
    __slots__ = ("address", "local", "remote", "errno", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    ERRNO_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    local: str
    remote: str
    errno: int
    error: str
    def __init__(self, address: _Optional[str] = ..., local: _Optional[str] = ..., remote: _Optional[str] = ..., errno: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Line(_message.Message):
    __slots__ = ("rtt_ms", "bytes_per_s", "error", "transport")
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    rtt_ms: float
    bytes_per_s: float
    error: str
    transport: Transport
    def __init__(self, rtt_ms: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., error: _Optional[str] = ..., transport: _Optional[_Union[Transport, str]] = ...) -> None: ...

class UnloadReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Feeding(_message.Message):
    __slots__ = ("model", "announcement", "data", "checksum")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    model: LoadRequest
    announcement: Announcement
    data: bytes
    checksum: int
    def __init__(self, model: _Optional[_Union[LoadRequest, _Mapping]] = ..., announcement: _Optional[_Union[Announcement, _Mapping]] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("file", "place", "size", "digest")
    FILE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    file: str
    place: int
    size: int
    digest: str
    def __init__(self, file: _Optional[str] = ..., place: _Optional[int] = ..., size: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("bytes", "refused", "waits")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    refused: bool
    waits: bool
    def __init__(self, bytes: _Optional[int] = ..., refused: _Optional[bool] = ..., waits: _Optional[bool] = ...) -> None: ...
