"""A ``fetch`` that arrives after its own ``cancel``: the lease that it takes is given back, not renewed for ever."""

from contract.requests import SendTransfer
from kv_transfer.protocol import messages as msg
from tests.protocol.decode_side import DecodeSide
from tests.protocol.frames import frame_of, message_of
from tests.protocol.prefill_side import PrefillSide
from tests.protocol.sink import Sink
from tests.protocol.worlds import ONE


def test_messages_about_a_forgotten_transfer_are_answered_with_a_cancel() -> None:
    sink = Sink()
    prefill, decode = PrefillSide(ONE, sink, "P0.1"), DecodeSide(ONE, sink, "D0.1")
    prefill.prepare()
    prefill.accept(0, 0, 0, SendTransfer("t0"))
    prefill.step()
    prefill.digest(False)
    for message in (msg.CancelFetch("t0", 0), msg.FetchBlocks("t0", 0)):
        prefill.hear("D0.1", frame_of(message))
        prefill.carry_out()
    words = [effect for effect in sink.take() if effect[0] == "say"]
    assert [type(message_of(frame)) for _, _, frame in words] == [msg.BlocksPublished, msg.TransferComplete]
    prefill.expire(("D0.1",))
    prefill.carry_out()
    prefill.step()
    assert prefill.what_is_held()
    for _, _, frame in words:
        decode.hear("P0.1", frame)
    answers = [(peer, message_of(frame)) for _, peer, frame in sink.take()]
    assert answers == [("P0.1", msg.CancelFetch("t0", 0))] * 2
    for _, answer in answers:
        prefill.hear("D0.1", frame_of(answer))
        prefill.carry_out()
    prefill.step()
    assert prefill.what_is_held() == []
