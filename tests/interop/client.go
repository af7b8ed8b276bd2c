// Makes the calls of a JSON file with grpc-go, one after another, and prints their outcomes as JSON.
// The messages are bytes that the caller has encoded, so that no generated code is needed.
package main

import (
	"context"
	"encoding/json"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

type call struct {
	Path      string
	Request   []byte // base64 in JSON
	TimeoutMs int64  `json:"timeout_ms"`
}

type outcome struct {
	Code    uint32 `json:"code"`
	Message string `json:"message"`
	Reply   []byte `json:"reply"`
}

type raw struct{}

func (raw) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }

func (raw) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = append([]byte{}, data...)
	return nil
}

func (raw) Name() string { return "proto" }

func main() {
	address, path := os.Args[1], os.Args[2]
	text, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	var calls []call
	if err := json.Unmarshal(text, &calls); err != nil {
		panic(err)
	}
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		panic(err)
	}
	defer connection.Close()
	outcomes := []outcome{}
	for _, one := range calls {
		timeout := time.Duration(one.TimeoutMs) * time.Millisecond
		deadline, cancel := context.WithTimeout(context.Background(), timeout)
		reply := []byte{}
		err := connection.Invoke(deadline, one.Path, &one.Request, &reply, grpc.ForceCodec(raw{}))
		cancel()
		found := status.Convert(err)
		outcomes = append(outcomes, outcome{uint32(found.Code()), found.Message(), reply})
	}
	json.NewEncoder(os.Stdout).Encode(outcomes)
}
