# SPDX-License-Identifier: Apache-2.0
"""Fields become the library's configs; a wrong one is named with a remedy."""

import pytest

from configs import demo, smollm2, tiny
from experiments import config, defaults
from lynx_jax.config import (
  Axis,
  ConfigError,
  Order,
  Rotation,
  TensorCodec,
)
from lynx_jax.engine import Mode
from lynx_jax.patience import Patience, Policy
from lynx_jax.transport.fault_plan import Fault, Peer, PeerFault, Step


def _settings(**fields) -> config.Settings:
  """Returns settings with fields set by `group__name`."""
  values = defaults.base()
  for name, value in fields.items():
    *groups, last = name.split('__')
    place = values
    for group in groups:
      place = place[group]
    place[last] = value
  return config.settings(values)


@pytest.mark.parametrize('file', [demo, smollm2, tiny])
@pytest.mark.parametrize('arg', [None, 'code'])
def test_config_files_are_valid_and_say_how_to_run(file, arg):
  settings = config.settings(file.get_config(arg))
  assert [file for file, _ in settings.prompts] == [arg or 'book']
  for word in ('Cost:', 'Expected:', 'python -m experiments.main --config='):
    assert word in file.__doc__


def test_schemes_are_values():
  schemes = {s.name: s for s in _settings().schemes}
  assert {
    name: (s.codec.k.planes, s.codec.v.planes, s.order, s.target)
    for name, s in schemes.items()
  } == {
    'bf16': ((), (), Order.ANCHOR_FIRST, 'dense'),
    'int8': ((8,), (8,), Order.ANCHOR_FIRST, 'planes:1'),
    'int4': ((4,), (4,), Order.ANCHOR_FIRST, 'planes:1'),
    'lynx': ((4, 4), (4, 4), Order.ANCHOR_FIRST, 'planes:2'),
    'interleaved': ((4, 4), (4, 4), Order.INTERLEAVED, 'planes:2'),
  }
  # All else is one codec, or the comparison would be of something else.
  assert len({(s.codec.group, s.codec.sinks) for s in schemes.values()}) == 1


def test_an_exact_scheme_is_a_value_without_rotation():
  (scheme, lynx) = _settings(
    scheme='lynx_exact,lynx', codec__k_rotation='hadamard'
  ).schemes
  assert scheme.target == 'exact'
  assert scheme.codec.exact
  assert scheme.codec.k.rotation is Rotation.NONE
  assert not lynx.codec.exact
  assert lynx.codec.k.rotation is Rotation.HADAMARD
  exact = _settings(scheme='lynx,int8,bf16', codec__exact=True)
  assert [s.codec.exact for s in exact.schemes] == [True, False, False]
  assert exact.schemes[0].codec == scheme.codec


def test_codec_fields():
  settings = _settings(
    scheme='lynx',
    codec__k='2, 2,4',
    codec__v='(8,)',
    codec__k_axis='token',
    codec__v_rotation='hadamard',
    codec__sinks=0,
  )
  (scheme,) = settings.schemes
  assert scheme.codec.k == TensorCodec(planes=(2, 2, 4), axis=Axis.TOKEN)
  assert scheme.codec.v == TensorCodec(planes=(8,), rotation=Rotation.HADAMARD)
  assert scheme.codec.sinks == 0


def test_layer_ranges():
  (lynx, int8) = _settings(
    scheme='lynx,int8', codec__layers='0:6 k=8 v=4,4; 24:30 v=2,2'
  ).schemes
  planes = [
    tuple(tensor.planes for tensor in lynx.codec.of_layer(layer))
    for layer in (0, 5, 6, 23, 24, 29)
  ]
  first, middle, last = ((8,), (4, 4)), ((4, 4), (4, 4)), ((4, 4), (2, 2))
  assert planes == [first, first, middle, middle, last, last]
  assert int8.codec.layers == ()


def test_engine_of_a_scheme():
  settings = _settings(scheme='interleaved', engine__draft_tokens=3)
  (scheme,) = settings.schemes
  engine = scheme.engine(settings.engine)
  assert engine.order is Order.INTERLEAVED
  assert engine.draft_tokens == 3
  assert engine.prompt_tokens == 1984


def test_several_modes_and_doubled_names():
  settings = _settings(mode='serial,overlapped', scheme='lynx, lynx ,int4')
  assert settings.modes == (Mode.SERIAL, Mode.OVERLAPPED)
  assert [s.name for s in settings.schemes] == ['lynx', 'int4']


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'prompt_file': 'book,code,book'}, 'names book more than once'),
    ({'scheme': 'lnyx'}, "'lnyx' must be one of .* did you mean 'lynx'"),
    ({'scheme': ''}, "scheme='' must name one of"),
    ({'scheme': ' , '}, 'must name one of'),
    ({'mode': 'seriell'}, "did you mean 'serial'"),
    ({'codec__k': '3,4'}, r'width 3 in \(3, 4\)'),
    ({'codec__k': '8,8'}, 'add up to 16 bits'),
    ({'codec__v': '4;4'}, "codec.v='4;4' must be widths"),
    ({'codec__k': '-4'}, "codec.k='-4' must be widths"),
    ({'codec__k': ''}, 'must both have planes'),
    ({'codec__k_axis': 'chanel'}, "did you mean 'channel'"),
    ({'codec__v_rotation': 'Hadamar'}, "did you mean 'hadamard'"),
    ({'codec__group': 100}, 'codec.group=100'),
    ({'codec__sinks': -1}, 'codec.sinks=-1'),
    ({'codec__recent_tokens': -1}, 'codec.recent_tokens=-1'),
    ({'codec__layers': '0-6 k=8'}, "codec.layers='0-6 k=8' must be"),
    ({'codec__layers': '0:6'}, 'START:STOP'),
    ({'codec__layers': '0:6 q=8'}, 'START:STOP'),
    ({'codec__layers': '6:6 k=8'}, 'must be non-empty'),
    ({'codec__layers': '0:6 k=5'}, 'width 5'),
    ({'engine__token_chunk': 100}, 'token_chunk=100 .* codec.group=128'),
    ({'engine__draft_tokens': 16}, 'draft_tokens=16'),
    ({'engine__slots': 0}, 'engine.slots=0'),
    ({'engine__chunk_bytes': -1}, 'engine.chunk_bytes=-1'),
    ({'prompt_tokens': 0}, 'prompt_tokens=0 must be positive'),
    ({'output_tokens': -3}, 'output_tokens=-3 must be positive'),
    ({'repeats': 0}, 'repeats=0'),
    ({'cpu_devices': 0}, 'cpu_devices=0'),
    ({'seed': -1}, 'seed=-1'),
    ({'prompt_file': ''}, 'prompt_file'),
    ({'model__path': ''}, 'model.path'),
    ({'model__dtype': 'bf16'}, "did you mean 'bfloat16'"),
    ({'link__rate_gbps': 0.0}, 'link.rate_gbps=0.0 must be positive'),
    ({'link__rate_gbps': -1.0}, 'link.rate_gbps=-1.0'),
    ({'link__rate_gbps': float('inf')}, 'link.rate_gbps=inf'),
    ({'link__rate_gbps': float('nan')}, 'link.rate_gbps=nan'),
    ({'link__rtt_ms': -0.1}, 'link.rtt_ms=-0.1'),
    ({'link__share': 0.0}, 'link.share=0.0'),
    (
      {'codec__exact': True, 'codec__v_rotation': 'hadamard'},
      'codec.v_rotation=hadamard',
    ),
    ({'codec__exact': True, 'codec__k': '()', 'codec__v': '()'}, 'codec.k=()'),
    ({'link__emulated': False}, 'link.emulated=False needs link.rate_gbps'),
    ({'link__share': 1.0}, 'link.share=1.0'),
    ({'link__jitter_ms': -1.0}, 'link.jitter_ms=-1.0'),
    ({'patience__stall_s': 0.0}, 'patience.stall_s=0.0 must be positive'),
    ({'patience__handshake_s': 1e10}, 'and at most 1000000'),
    ({'transfer__lease_s': 1e300}, 'must be at most 1000000'),
    ({'link__rtt_ms': 1e12}, 'link.rtt_ms=1000000000000.0 must be in 0..'),
    (
      {'scheme': 'lynx_exact', 'decode_mesh': 2},
      'scheme=lynx_exact needs one device a side',
    ),
    ({'output_tokens': 1}, 'output_tokens=1 must be 2 or more'),
    ({'seed': 1 << 32}, 'seed=4294967296 must be in 0..4294967295'),
    ({'faults__corrupt': 0.5}, 'set how many faults there may be'),
    ({'patience__residual': 'anchor'}, "did you mean 'anchor_ok'"),
    ({'transfer__lease_s': -2.0}, 'transfer.lease_s=-2.0 must be positive'),
    ({'transfer__window_bytes': 0}, 'transfer.window_bytes=0'),
    ({'faults__corrupt': 1.5}, r'faults.corrupt=1.5 must be in 0..1'),
    ({'faults__most': -1}, 'faults.most=-1 must be 0 or more'),
    ({'faults__peer': 'kill'}, "faults.peer='kill' must be WHAT@STEP:COUNT"),
    ({'faults__peer': 'hang@pull:1'}, "faults.peer='hang' must be one of"),
    ({'faults__peer': 'kill@pul:1'}, "did you mean 'pull'"),
    ({'faults__peer': 'kill@pull:0'}, 'faults.peer count=0 must be 1 or more'),
    ({'sampling__temperature': -1.0}, 'sampling.temperature=-1.0 must be 0'),
    ({'sampling__top_p': 0.0}, 'sampling.top_p=0.0 must be above 0'),
    ({'sampling__top_k': -1}, 'sampling.top_k=-1 must be 0'),
    ({'sampling__min_p': 1.5}, 'sampling.min_p=1.5 must be in 0'),
    ({'sampling__seed': -1}, 'sampling.seed=-1 must be in 0..'),
  ],
)
def test_a_wrong_value_is_named_with_its_remedy(fields, message):
  with pytest.raises(ConfigError, match=message) as error:
    _settings(**fields)
  assert '\n' not in str(error.value)


def test_faults_and_patience_reach_the_library():
  settings = _settings(
    faults__most=3,
    faults__late=0.5,
    faults__peer='stop@done:2',
    faults__back_s=0.25,
    patience__residual='anchor_ok',
  )
  assert settings.patience == Patience(residual=Policy.ANCHOR_OK)
  plan = settings.faults
  assert plan.chances[Fault.LATE] == 0.5
  assert plan.peer == PeerFault(
    what=Peer.STOP, step=Step.DONE, count=2, back_s=0.25
  )
  assert not plan.nothing
  assert _settings().faults.nothing


@pytest.mark.parametrize(
  'name, nearest',
  [
    ('schem', 'scheme'),
    ('codec.kk', 'codec.k'),
    ('output_token', 'output_tokens'),
    ('rate_gbps', 'link.rate_gbps'),
    ('link.rate', 'link.rate_gbps'),
    ('drafttokens', 'engine.draft_tokens'),
  ],
)
def test_an_unknown_field_names_the_nearest(name, nearest):
  assert defaults.unknown_field(name).endswith(f'mean config.{nearest}?')


def test_an_unknown_field_of_a_config_file():
  values = defaults.base()
  values.codec.bits = 4
  with pytest.raises(ConfigError, match=r'config\.codec\.bits does not exist'):
    config.settings(values)


def test_a_missing_field_of_a_config_file():
  values = defaults.base()
  del values.link['share']
  with pytest.raises(ConfigError, match=r'config\.link\.share is missing'):
    config.settings(values)
