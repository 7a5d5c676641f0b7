// Calls a headrace server over plain HTTP, with Go's standard library.
//
//	go run ./http [host:port]
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"headrace.example/clients/zero"
)

const headerSize = "Inference-Header-Content-Length"

// refusal is a request that the server refused.
type refusal struct {
	status int
	reason string
}

func (r *refusal) Error() string { return fmt.Sprintf("%d %s", r.status, r.reason) }

// tensor is an input or output in JSON; without Data its bytes follow the JSON.
type tensor struct {
	Name       string           `json:"name"`
	Datatype   string           `json:"datatype"`
	Shape      []int64          `json:"shape"`
	Data       []int32          `json:"data,omitempty"`
	Parameters map[string]int64 `json:"parameters,omitempty"`
}

func (t tensor) String() string {
	shape := strings.Join(strings.Fields(fmt.Sprint(t.Shape)), ",")
	return fmt.Sprintf("%s %s %s", t.Name, t.Datatype, shape)
}

type request struct {
	ID         string          `json:"id,omitempty"`
	Inputs     []tensor        `json:"inputs"`
	Parameters map[string]bool `json:"parameters,omitempty"`
}

type response struct {
	Outputs []tensor `json:"outputs"`
}

type client struct {
	server string
	ctx    context.Context
}

// send returns the response of a request; a *refusal unless it is answered with 200.
func (c client) send(method, path string, header http.Header, body []byte) (*http.Response, error) {
	r, err := http.NewRequestWithContext(c.ctx, method, "http://"+c.server+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header = header
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode == http.StatusOK {
		return answer, nil
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return nil, err
	}
	var document struct{ Error string }
	if json.Unmarshal(text, &document) != nil || document.Error == "" {
		document.Error = string(text) // not the server's own: a proxy's page, for example
	}
	return nil, &refusal{answer.StatusCode, document.Error}
}

func (c client) post(path string, document any) (*http.Response, error) {
	body, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	return c.send(http.MethodPost, path, http.Header{}, body)
}

func decode(answer *http.Response, into any) error {
	defer answer.Body.Close()
	return json.NewDecoder(answer.Body).Decode(into)
}

func (c client) get(path string, into any) error {
	answer, err := c.send(http.MethodGet, path, http.Header{}, nil)
	if err != nil {
		return err
	}
	return decode(answer, into)
}

func described(tensors []tensor) string {
	texts := make([]string, len(tensors))
	for i, t := range tensors {
		texts[i] = t.String()
	}
	return strings.Join(texts, " and ")
}

func (c client) metadata() error {
	var own struct{ Name, Version string }
	if err := c.get("/v2", &own); err != nil {
		return err
	}
	fmt.Printf("server: %s %s\n", own.Name, own.Version)
	var model struct{ Inputs, Outputs []tensor }
	if err := c.get("/v2/models/digits", &model); err != nil {
		return err
	}
	fmt.Printf("digits: %s -> %s\n", described(model.Inputs), described(model.Outputs))
	return nil
}

// plain sends tensors as JSON: sums and differences of 16 integers.
func (c client) plain() error {
	numbers, ones := make([]int32, 16), make([]int32, 16)
	for i := range numbers {
		numbers[i], ones[i] = int32(i), 1
	}
	shape := []int64{1, 16}
	answer, err := c.post("/v2/models/simple/infer", request{ID: "sums", Inputs: []tensor{
		{Name: "INPUT0", Datatype: "INT32", Shape: shape, Data: numbers},
		{Name: "INPUT1", Datatype: "INT32", Shape: shape, Data: ones},
	}})
	if err != nil {
		return err
	}
	var found response
	if err := decode(answer, &found); err != nil {
		return err
	}
	texts := map[string]string{}
	for _, output := range found.Outputs {
		text := strings.Join(strings.Fields(fmt.Sprint(output.Data)), ",")
		texts[output.Name] = strings.Trim(text, "[]")
	}
	fmt.Printf("plain: sums %s, differences %s\n", texts["OUTPUT0"], texts["OUTPUT1"])
	return nil
}

// binary sends tensors as little-endian bytes behind the JSON, in both directions.
func (c client) binary() error {
	var pixels bytes.Buffer
	if err := binary.Write(&pixels, binary.LittleEndian, zero.Image); err != nil {
		return err
	}
	size := map[string]int64{"binary_data_size": int64(pixels.Len())}
	document, err := json.Marshal(request{
		Inputs:     []tensor{{Name: "image", Datatype: "FP32", Shape: []int64{1, 8, 8}, Parameters: size}},
		Parameters: map[string]bool{"binary_data_output": true},
	})
	if err != nil {
		return err
	}
	header := http.Header{}
	header.Set("Content-Type", "application/octet-stream")
	header.Set(headerSize, strconv.Itoa(len(document)))
	answer, err := c.send(
		http.MethodPost, "/v2/models/digits/infer", header, append(document, pixels.Bytes()...))
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	offset, err := strconv.ParseInt(answer.Header.Get(headerSize), 10, 64)
	if err != nil || offset > int64(len(body)) {
		return fmt.Errorf("%s is %q for a body of %d bytes", headerSize, answer.Header.Get(headerSize), len(body))
	}
	var found response
	if err := json.Unmarshal(body[:offset], &found); err != nil {
		return err
	}
	data := map[string][]byte{}
	for _, output := range found.Outputs {
		end := offset + output.Parameters["binary_data_size"]
		data[output.Name] = body[offset:end]
		offset = end
	}
	label := binary.LittleEndian.Uint64(data["label"])
	probability := math.Float32frombits(binary.LittleEndian.Uint32(data["probabilities"][4*label:]))
	fmt.Printf("binary: a %d, probability %.3f\n", label, probability)
	return nil
}

// stream reads one server-sent event for each response.
func (c client) stream() error {
	story := "The miller"
	answer, err := c.post("/v2/models/storyteller/generate_stream",
		map[string]any{"text_input": story, "max_tokens": 5})
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if !strings.HasPrefix(line, "data:") {
			continue // an empty line ends an event
		}
		var event struct {
			Text  string `json:"text_output"`
			Error string `json:"error"`
		}
		if err := json.Unmarshal([]byte(line[len("data:"):]), &event); err != nil {
			return err
		}
		if event.Error != "" {
			return errors.New(event.Error)
		}
		story += event.Text
	}
	fmt.Println("stream:", story)
	return lines.Err()
}

func (c client) refused() error {
	_, err := c.post("/v2/models/nosuch/infer", request{Inputs: []tensor{}})
	var refused *refusal
	if !errors.As(err, &refused) {
		return err
	}
	fmt.Println("refused:", refused)
	return nil
}

func main() {
	server := "127.0.0.1:8000"
	if len(os.Args) > 1 {
		server = os.Args[1]
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c := client{server, ctx}
	for _, step := range []func() error{c.metadata, c.plain, c.binary, c.stream, c.refused} {
		if err := step(); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", server, err)
			os.Exit(1)
		}
	}
}
