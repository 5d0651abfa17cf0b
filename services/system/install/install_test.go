package install

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// run runs the program, and returns its last report.
func run(t *testing.T, in []byte) (last Report, status int) {
	t.Helper()
	var out bytes.Buffer
	status = Main(t.Context(), bytes.NewReader(in), &out, nil)
	for line := range bytes.Lines(out.Bytes()) {
		last = Report{}
		if err := json.Unmarshal(line, &last); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
	}
	return last, status
}

func TestProgram(t *testing.T) {
	t.Parallel()
	image := uki.Image(t, "v2.0.0", "quiet console=ttyS0 "+boot.ISOArgument)
	sum := sha256.Sum256(image)
	r := Request{
		File: filepath.Join(t.TempDir(), "B.efi"), Size: int64(len(image)), SHA256: hex.EncodeToString(sum[:]),
		Running: []string{"loglevel=7", "garboard.platform=metal", "garboard.slot=A", "garboard.trial", boot.ISOArgument}, Args: []string{"quiet", "nomodeset"},
	}
	input := func(system []byte) []byte {
		request, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		return append(append(request, '\n'), system...)
	}
	last, status := run(t, input(image))
	// What a machine is stays, also that its disk has its configuration, and what was of its slot or its former system
	// goes.
	if want := []string{"quiet", "console=ttyS0", "garboard.platform=metal", boot.ISOArgument, "nomodeset"}; status != 0 || last.Version != "v2.0.0" || !slices.Equal(last.Args, want) {
		t.Errorf("status %d, %+v", status, last)
	}
	if got := (Request{Running: []string{"garboard.platform=metal", boot.ISOArgument}}).arguments(esp.Image{}); !slices.Equal(got, []string{"garboard.platform=metal"}) {
		t.Errorf("a machine that was installed from a medium has the arguments %q", got)
	}
	hard := esp.Image{Cmdline: "lockdown=integrity slab_nomerge quiet"}
	for _, c := range []struct{ args, want []string }{
		{nil, []string{"lockdown=integrity", "slab_nomerge", "quiet"}},
		{[]string{"lockdown=none"}, []string{"slab_nomerge", "quiet", "lockdown=none"}},
	} {
		if got := (Request{Args: c.args}).arguments(hard); !slices.Equal(got, c.want) {
			t.Errorf("a hardened system, with %q: %q", c.args, got)
		}
	}
	if got, err := os.ReadFile(r.File); err != nil || !bytes.Equal(got, image) {
		t.Errorf("the file has %d bytes, %v", len(got), err)
	}
	damaged := bytes.Clone(image)
	damaged[len(damaged)/2] ^= 1
	for name, c := range map[string]struct {
		in   []byte
		want string
	}{
		"damaged":    {input(damaged), "its system has the SHA-256"},
		"cut off":    {input(image[:1000]), "its system has the SHA-256"},
		"no request": {image, "the request can't be read"},
		"no input":   {nil, "the request can't be read"},
	} {
		if last, status := run(t, c.in); status == 0 || !strings.Contains(last.Error, c.want) || last.Version != "" {
			t.Errorf("%s: status %d, %+v", name, status, last)
		}
	}
	r.Size = 1 << 60
	if last, status := run(t, input(image)); status == 0 || !strings.Contains(last.Error, "and the EFI system partition has") {
		t.Errorf("no room: status %d, %+v", status, last)
	}
}
