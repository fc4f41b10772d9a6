# SPDX-License-Identifier: Apache-2.0
"""The control channel's messages: what is sent is read, and nothing else."""

import dataclasses
import typing

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_jax.transport import messages

SCALARS = st.one_of(
  st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=9)
)
FIELDS = {
  int: st.integers(-(2**31), 2**63),
  float: st.floats(allow_nan=False),
  str: st.text(max_size=20),
  bytes: st.binary(max_size=20),
  bool: st.booleans(),
}


def _values(hint):
  if hint in FIELDS:
    return FIELDS[hint]
  if hint == messages.Scalar:
    return SCALARS
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin is dict:
    return st.dictionaries(_values(inner[0]), _values(inner[1]), max_size=3)
  if origin is tuple and inner[-1] is Ellipsis:
    return st.lists(_values(inner[0]), max_size=3).map(tuple)
  if origin is tuple:
    return st.tuples(*map(_values, inner))
  return st.one_of(
    *(st.none() if each is type(None) else _values(each) for each in inner)
  )


KINDS = typing.get_args(messages.Message)
ANY = st.one_of(
  *(
    st.builds(
      kind,
      **{
        name: _values(hint)
        for name, hint in typing.get_type_hints(kind).items()
      },
    )
    for kind in KINDS
  )
)


@given(ANY)
def test_what_is_sent_is_read(message):
  assert messages.decode(messages.encode(message)) == message


@given(st.binary(max_size=200))
def test_junk_is_an_error_and_nothing_else(data):
  try:
    message = messages.decode(data)
  except messages.ProtocolError:
    return
  assert messages.encode(message)  # by chance it was one


@given(ANY, st.data())
def test_a_field_of_another_type_is_refused(message, data):
  name, *values = msgpack.unpackb(messages.encode(message), use_list=False)
  if not values:
    values = [1]  # a field too many
  else:
    index = data.draw(st.integers(0, len(values) - 1))
    values[index] = {1: 2.0}  # no field takes this
  with pytest.raises(messages.ProtocolError, match=name):
    messages.decode(msgpack.packb([name, *values]))


def test_messages_are_bounded():
  large = messages.Failed(
    request=1, generation=0, kind='x', text='y' * messages.MAX_BYTES
  )
  with pytest.raises(messages.ProtocolError, match='at most'):
    messages.encode(large)
  with pytest.raises(messages.ProtocolError, match='no message'):
    messages.decode(bytes(messages.MAX_BYTES + 1))


@pytest.mark.parametrize('kind', KINDS)
def test_messages_do_not_change(kind):
  assert dataclasses.is_dataclass(kind)
  assert kind.__dataclass_params__.frozen
