import httpx
import pytest

from benchmarks.answers import judge
from benchmarks.peers.bare_uvicorn import app


@pytest.mark.parametrize("path", ["/predict", "/readyz"])
async def test_any_request_gets_a_well_formed_answer(path, requests):
    async def body():
        yield bytes(700)
        yield bytes(84)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://bare"
    ) as client:
        response = await client.post(path, content=body())
    assert response.status_code == 200
    assert judge(response.content, requests[0]).error == ""
