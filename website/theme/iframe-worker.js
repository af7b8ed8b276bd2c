// Browsers start no worker for a page of the file system: there the theme's search runs its script
// in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("message", (event) => this.onmessage?.(event));
      this.started = new Promise((resolve) => (this.frame.onload = resolve));
      this.frame.srcdoc = `<title>search</title><script>
        self.postMessage = (data) =>
          frameElement.dispatchEvent(new MessageEvent("message", { data }));
        </script><script src="${url}"></script>`;
      document.body.append(this.frame);
    }

    async postMessage(data) {
      await this.started;
      const { MessageEvent } = this.frame.contentWindow;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
