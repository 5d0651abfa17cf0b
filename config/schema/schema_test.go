package schema

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/patch"
)

// compiled is the compiled schema; it must be valid.
func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	text, err := JSON()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("v1alpha1.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("v1alpha1.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// validate returns the error that an editor would show for a document.
func validate(t *testing.T, s *jsonschema.Schema, doc []byte) error {
	t.Helper()
	var v any
	if err := yaml.Unmarshal(doc, &v); err != nil {
		t.Fatal(err)
	}
	return s.Validate(v)
}

var generated = sync.OnceValue(func() map[config.MachineType][]byte {
	docs := map[config.MachineType][]byte{}
	now := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	secrets, err := config.NewSecrets(now)
	if err != nil {
		panic(err)
	}
	for _, typ := range []config.MachineType{config.Init, config.ControlPlane, config.Worker} {
		c, err := config.Generate(config.Options{Type: typ, Endpoint: "https://10.5.0.2:6443", Secrets: secrets, Now: now})
		if err != nil {
			panic(err)
		}
		if docs[typ], err = c.Encode(); err != nil {
			panic(err)
		}
	}
	return docs
})

func TestGeneratedConfigurations(t *testing.T) {
	s := compiled(t)
	for typ, doc := range generated() {
		if err := validate(t, s, doc); err != nil {
			t.Errorf("%s: %v", typ, err)
		}
	}
}

// The examples of the reference page load, and editors report nothing.
func TestExamples(t *testing.T) {
	s := compiled(t)
	files, err := filepath.Glob("../testdata/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		example, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		doc, err := patch.Apply(generated()[config.ControlPlane], example)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		if _, _, err := config.Load(filepath.Base(file), doc); err != nil {
			t.Error(err)
		}
		if err := validate(t, s, doc); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// Examples that the guides call correct are correct in an editor, too. Mistakes
// of structure that Load refuses are marked there.
func TestGuides(t *testing.T) {
	s := compiled(t)
	wrong := map[string]bool{"02-mirror-of-everything": true, "09-wireguard": true, "13-keys-under-machine": true, "13-rotation-add": true, "13-rotation-remove": true}
	files, err := filepath.Glob("../testdata/guides/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		example, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		doc, err := patch.Apply(generated()[config.ControlPlane], example)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		err = validate(t, s, doc)
		if name := strings.TrimSuffix(filepath.Base(file), ".yaml"); (err != nil) != wrong[name] {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMistakesAreMarked(t *testing.T) {
	s := compiled(t)
	doc := generated()[config.Worker]
	for _, tt := range []struct{ patch, where string }{
		{"machine: {tokn: x}", "/machine"},
		{"machine: {type: master}", "/machine/type"},
		{"machine: {token: short}", "/machine/token"},
		{"machine: {type: null}", "/machine"},
		{"cluster: null", "''"},
		{"cluster: {controlPlane: null}", "/cluster"},
		{"version: v2", "/version"},
		{"machine: {network: {interfaces: [{interface: eth0, mtu: 1}]}}", "/machine/network/interfaces/0/mtu"},
		{"machine: {network: {interfaces: [{interface: eth0, cidr: 10.0.0.1}]}}", "/machine/network/interfaces/0/cidr"},
		{"machine: {time: {bootTimeout: 30}}", "/machine/time/bootTimeout"},
		{"machine: {time: {bootTimeout: soon}}", "/machine/time/bootTimeout"},
		{"machine: {certSANs: x}", "/machine/certSANs"},
		{"machine: {files: [{path: etc}]}", "/machine/files/0/path"},
		{"machine: {kubelet: {nodeTaints: {a: b}}}", "/machine/kubelet/nodeTaints/a"},
		{"cluster: {proxy: {mode: ebpf}}", "/cluster/proxy/mode"},
	} {
		patched, err := patch.Apply(doc, []byte(tt.patch))
		if err != nil {
			t.Fatal(err)
		}
		err = validate(t, s, patched)
		if err == nil || !strings.Contains(fmt.Sprint(err), tt.where) {
			t.Errorf("%s: %v", tt.patch, err)
		}
		if _, _, err := config.Load("x", patched); err == nil {
			t.Errorf("%s loads", tt.patch)
		}
	}
}
