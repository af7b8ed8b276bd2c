// The request of the page in other clients' words.

const BYTES = 784;

/** By client: `text` to copy, and what it `needs`. */
export function snippets(images, model, info, withKey) {
  const bytes = new Uint8Array(images.length * BYTES);
  images.forEach((image, i) => bytes.set(image, i * BYTES));
  const base64 = (part) => btoa(String.fromCharCode(...part));
  const each = images.map(base64);
  const { hostname, host, protocol } = location;
  const root = new URL(".", location).pathname.slice(0, -1); // where the service is mounted
  const origin = `${location.origin}${root}`;
  const start = `${withKey ? "import os\n" : ""}import base64
import numpy as np

images = [${each.map((text) => `"${text}"`).join(", ")}]
pixels = np.frombuffer(b"".join(map(base64.b64decode, images)), np.uint8).reshape(-1, 28, 28)
`;
  const needsKey = withKey ? " Set LENET_API_KEY to your key." : "";
  const header = withKey ? `{"authorization": f"Bearer {os.environ['LENET_API_KEY']}"}` : "";
  const triton = (kind, address) => ({
    text: `${start}
import tritonclient.${kind} as triton

image = triton.InferInput("image", list(pixels.shape), "UINT8")
image.set_data_from_numpy(pixels)
with triton.InferenceServerClient("${address}"${protocol === "https:" ? ", ssl=True" : ""}) as client:
    print(client.infer("${model}", [image]${withKey ? `, headers=${header}` : ""}).as_numpy("label").tolist())`,
    needs: `pip install 'tritonclient[${kind}]'${needsKey}`,
  });
  return {
    curl: {
      text: `curl -s '${origin}/predict?model=${encodeURIComponent(model)}'${withKey ? ' -H "Authorization: Bearer $LENET_API_KEY"' : ""} -H 'Content-Type: application/json' -d '{"images": [${each.map((text) => `"${text}"`).join(", ")}]}'`,
      needs: `A shell.${needsKey}`,
    },
    httpx: {
      text: `${start}
import httpx

answer = httpx.post("${origin}/predict", params={"model": "${model}"}, content=pixels.tobytes(),
                    headers={"content-type": "application/octet-stream"${withKey ? `, **${header}` : ""}})
print([one["label"] for one in answer.json()["predictions"]])`,
      needs: `pip install httpx numpy${needsKey}`,
    },
    tritonclient: triton("http", `${host}${root}`),
    ...(info?.grpc_port && { gRPC: triton("grpc", `${hostname}:${info.grpc_port}`) }),
  };
}
