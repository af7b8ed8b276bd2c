// Browsers start no worker for a page of the file system: there the theme's search runs its script
// in a hidden frame instead. Messages are copied, as between a page and a worker.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "Search";
      this.frame.addEventListener("message", (event) => this.onmessage?.(event));
      this.started = new Promise((resolve) => (this.frame.onload = resolve));
      this.frame.srcdoc = `<script>
        self.postMessage = (message) => {
          const data = parent.structuredClone(message);
          frameElement.dispatchEvent(new MessageEvent("message", { data }));
        };
        </script><script src="${url}"></script>`;
      document.body.append(this.frame);
    }

    async postMessage(message) {
      await this.started;
      const inside = this.frame.contentWindow;
      const data = inside.structuredClone(message);
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
