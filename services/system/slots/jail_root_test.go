package slots

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/services/core/process"
	"golang.org/x/sys/unix"
)

// The program of another system tries to reach something of ours. It gets its input, its output and the file of the
// slot.
func TestProgramInItsJail(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	built := filepath.Join(dir, "prisoner")
	build := exec.Command("go", "build", "-o", built, "./testdata/prisoner")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program, err := os.ReadFile(built)
	must(t, err)
	slot, err := os.OpenFile(filepath.Join(dir, "slot"), os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	defer slot.Close()
	l, err := net.Listen("tcp", "127.0.0.1:9")
	if err != nil { // somebody has it
		l, err = net.Listen("tcp", "127.0.0.1:0")
	}
	must(t, err)
	defer l.Close()
	secret, err := os.Open("/etc/passwd") // one of many that PID 1 has open
	must(t, err)
	defer secret.Close()
	for fd := 3; fd < 1024; fd++ { // whoever has started the tests may have left some open; nobody starts PID 1
		unix.CloseOnExec(fd)
	}
	t.Setenv("SECRET", "of PID 1")
	var out bytes.Buffer
	must(t, Options{Processes: process.New()}.jailed(t.Context(), bytes.NewReader(program), strings.NewReader("the system"), &out, slot))
	var r struct {
		UID, GID, PID, Parent int
		Groups, Descriptors   []int
		Env, Got              []string
		Input, Slot           string
	}
	must(t, json.Unmarshal(out.Bytes(), &r))
	if r.UID != jailUser || r.GID != jailUser || r.PID != 1 || r.Parent != 0 || len(r.Groups) > 0 || len(r.Env) > 0 || len(r.Got) > 0 || !slices.Equal(r.Descriptors, []int{0, 1, 2, 3}) {
		t.Errorf("%+v", r)
	}
	if r.Input != "the system<nil>" || r.Slot != "<nil>" {
		t.Errorf("it can't work: %+v", r)
	}
	if content, err := os.ReadFile(slot.Name()); err != nil || string(content) != "a system" {
		t.Errorf("%q, %v", content, err)
	}
}

// A program that isn't the signed one to its last byte doesn't run, and neither does one whose reading fails.
func TestProgramThatIsCutOff(t *testing.T) {
	t.Parallel()
	err := Options{Processes: process.New()}.jailed(t.Context(), errorReader{}, nil, nil, nil)
	if err == nil || err.Error() != "the medium is gone" {
		t.Errorf("%v", err)
	}
}

var errGone = errors.New("the medium is gone")

type errorReader struct{}

func (errorReader) Read([]byte) (int, error) { return 0, errGone }
