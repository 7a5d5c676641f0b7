// Calls a headrace server over gRPC, by stubs that protoc generates from `protos/`.
//
//	./build.sh && build/grpc [host:port]
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headrace.example/clients/inference"
	"headrace.example/clients/zero"
)

type client struct {
	stub inference.GRPCInferenceServiceClient
	ctx  context.Context
}

func commas(numbers any) string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(numbers)), ","), "[]")
}

func described(tensors []*inference.ModelMetadataResponse_TensorMetadata) string {
	texts := make([]string, len(tensors))
	for i, t := range tensors {
		texts[i] = fmt.Sprintf("%s %s [%s]", t.Name, t.Datatype, commas(t.Shape))
	}
	return strings.Join(texts, " and ")
}

func (c client) metadata() error {
	own, err := c.stub.ServerMetadata(c.ctx, &inference.ServerMetadataRequest{})
	if err != nil {
		return err
	}
	fmt.Printf("server: %s %s\n", own.Name, own.Version)
	model, err := c.stub.ModelMetadata(c.ctx, &inference.ModelMetadataRequest{Name: "digits"})
	if err != nil {
		return err
	}
	fmt.Printf("digits: %s -> %s\n", described(model.Inputs), described(model.Outputs))
	return nil
}

// outputs are the bytes of a response's outputs by name.
func outputs(response *inference.ModelInferResponse) map[string][]byte {
	found := map[string][]byte{}
	for i, output := range response.Outputs {
		found[output.Name] = response.RawOutputContents[i]
	}
	return found
}

// plain sends tensors as numbers in messages; responses are always raw.
func (c client) plain() error {
	numbers, ones := make([]int32, 16), make([]int32, 16)
	for i := range numbers {
		numbers[i], ones[i] = int32(i), 1
	}
	input := func(name string, data []int32) *inference.ModelInferRequest_InferInputTensor {
		return &inference.ModelInferRequest_InferInputTensor{
			Name: name, Datatype: "INT32", Shape: []int64{1, 16},
			Contents: &inference.InferTensorContents{IntContents: data},
		}
	}
	response, err := c.stub.ModelInfer(c.ctx, &inference.ModelInferRequest{
		ModelName: "simple",
		Id:        "sums",
		Inputs: []*inference.ModelInferRequest_InferInputTensor{
			input("INPUT0", numbers), input("INPUT1", ones),
		},
	})
	if err != nil {
		return err
	}
	raw := outputs(response)
	sums, differences := make([]int32, 16), make([]int32, 16)
	for name, into := range map[string][]int32{"OUTPUT0": sums, "OUTPUT1": differences} {
		if err := binary.Read(bytes.NewReader(raw[name]), binary.LittleEndian, into); err != nil {
			return fmt.Errorf("output %s: %w", name, err)
		}
	}
	fmt.Printf("plain: sums %s, differences %s\n", commas(sums), commas(differences))
	return nil
}

// binary sends tensors as little-endian bytes, which neither side converts.
func (c client) binary() error {
	var pixels bytes.Buffer
	if err := binary.Write(&pixels, binary.LittleEndian, zero.Image); err != nil {
		return err
	}
	response, err := c.stub.ModelInfer(c.ctx, &inference.ModelInferRequest{
		ModelName: "digits",
		Inputs: []*inference.ModelInferRequest_InferInputTensor{
			{Name: "image", Datatype: "FP32", Shape: []int64{1, 8, 8}},
		},
		RawInputContents: [][]byte{pixels.Bytes()},
	})
	if err != nil {
		return err
	}
	raw := outputs(response)
	label := binary.LittleEndian.Uint64(raw["label"])
	probability := math.Float32frombits(binary.LittleEndian.Uint32(raw["probabilities"][4*label:]))
	fmt.Printf("binary: a %d, probability %.3f\n", label, probability)
	return nil
}

// stream reads many responses to one request. Texts are bytes, each after its length in 4 bytes.
func (c client) stream() error {
	story := "The miller"
	messages, err := c.stub.ModelStreamInfer(c.ctx)
	if err != nil {
		return err
	}
	err = messages.Send(&inference.ModelInferRequest{
		ModelName: "storyteller",
		Inputs: []*inference.ModelInferRequest_InferInputTensor{
			{
				Name: "text_input", Datatype: "BYTES", Shape: []int64{1},
				Contents: &inference.InferTensorContents{BytesContents: [][]byte{[]byte(story)}},
			},
			{
				Name: "max_tokens", Datatype: "INT64", Shape: []int64{1},
				Contents: &inference.InferTensorContents{Int64Contents: []int64{5}},
			},
		},
	})
	if err != nil {
		return err
	}
	if err := messages.CloseSend(); err != nil {
		return err
	}
	for {
		message, err := messages.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if message.ErrorMessage != "" {
			return errors.New(message.ErrorMessage)
		}
		text := outputs(message.InferResponse)["text_output"]
		story += string(text[4:][:binary.LittleEndian.Uint32(text)])
	}
	fmt.Println("stream:", story)
	return nil
}

func (c client) refused() error {
	_, err := c.stub.ModelInfer(c.ctx, &inference.ModelInferRequest{ModelName: "nosuch"})
	if status.Code(err) != codes.NotFound {
		return err
	}
	fmt.Println("refused: NOT_FOUND", status.Convert(err).Message())
	return nil
}

func main() {
	server := "127.0.0.1:8001"
	if len(os.Args) > 1 {
		server = os.Args[1]
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	connection, err := grpc.Dial(server, grpc.WithInsecure())
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", server, err)
		os.Exit(1)
	}
	defer connection.Close()
	c := client{inference.NewGRPCInferenceServiceClient(connection), ctx}
	for _, step := range []func() error{c.metadata, c.plain, c.binary, c.stream, c.refused} {
		if err := step(); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %s %s\n", server, status.Code(err), status.Convert(err).Message())
			os.Exit(1)
		}
	}
}
