package deb

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const index = `Package: xfsprogs
Version: 6.1.0-1
Pre-Depends: libc6
Depends: libblkid1 (>= 2.36), libicu72 (>= 72.1~rc-1~) | libicu71, python3:any
Description: tools
 Depends: not a field, but a continued line
SHA256: abc123
`

func TestParse(t *testing.T) {
	want := Package{Name: "xfsprogs", Version: "6.1.0-1", SHA256: "abc123", Depends: []string{"libc6", "libblkid1", "libicu72", "python3"}}
	got := parse([]byte(index))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if want := "xfsprogs=6.1.0-1@sha256:abc123"; got.Key() != want {
		t.Errorf("key %s, want %s", got.Key(), want)
	}
}

// fakeTools puts programs before apt's own, so that no test depends on the machine's package lists.
func fakeTools(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

const fakeCache = `for name; do
	case $name in
	tool) printf 'Package: tool\nVersion: 1\nDepends: liba, perl, libb\nSHA256: 1\n\n' ;;
	liba) printf 'Package: liba\nVersion: 2\nDepends: libb, libc6\nSHA256: 2\n\n' ;;
	libb) printf 'Package: libb\nVersion: 3\nDepends: liba\nSHA256: 3\n\n' ;;
	libc6) printf 'Package: libc6\nVersion: 4\nSHA256: 4\n\n' ;;
	esac
done
`

func TestClosure(t *testing.T) {
	fakeTools(t, map[string]string{"apt-cache": fakeCache})
	packages, err := Lists{}.Closure(context.Background(), func(name string) bool { return strings.HasPrefix(name, "lib") }, "tool")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range packages {
		names = append(names, p.Name)
	}
	if diff := cmp.Diff([]string{"tool", "liba", "libb", "libc6"}, names); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestResolveUnknown(t *testing.T) {
	fakeTools(t, map[string]string{"apt-cache": fakeCache})
	if _, err := (Lists{}).Resolve(context.Background(), "tool", "nosuch"); !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("error %v, want ErrUnknown that names the package", err)
	}
}

// The machine's own mirrors are used, with the release's name, and a machine that knows none gets told what to do.
func TestMirrors(t *testing.T) {
	t.Setenv(MirrorVar, "")
	fakeTools(t, map[string]string{"apt-get": `printf '%s\n' 'Google|x|http://a/|' 'Debian|Debian|http://b/debian/' 'Debian|Debian-Security|http://c/security/' 'Debian|Debian|http://d/debian/'`})
	main, security, err := mirrors(t.Context())
	if main != "http://b/debian/" || security != "http://c/security/" || err != nil {
		t.Errorf("%q, %q, %v", main, security, err)
	}
	fakeTools(t, map[string]string{"apt-get": `echo 'Ubuntu|Ubuntu|http://b/ubuntu/'`})
	if err := Update(t.Context(), t.TempDir()); err == nil || !strings.Contains(err.Error(), MirrorVar) {
		t.Errorf("error %v doesn't name %s", err, MirrorVar)
	}
}

// A mirror whose Release file no key of Debian has signed is refused.
func TestUpdateWantsASignature(t *testing.T) {
	asked := make(chan string, 100)
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
		if !strings.HasSuffix(r.URL.Path, "/Release") {
			http.NotFound(w, r)
			return
		}
		suite := strings.Split(r.URL.Path, "/")[3]
		fmt.Fprintf(w, "Origin: Debian\nSuite: stable\nCodename: %s\nDate: %s\nComponents: main\nArchitectures: amd64\n", suite, time.Now().UTC().Format(time.RFC1123))
	}))
	defer mirror.Close()
	t.Setenv(MirrorVar, mirror.URL+"/debian")
	err := Update(t.Context(), t.TempDir())
	if err == nil || !strings.Contains(err.Error(), "is not signed") {
		t.Errorf("error %v doesn't say that the lists aren't signed", err)
	}
	if first := <-asked; first != "/debian/dists/"+Release+"/InRelease" {
		t.Errorf("asked for %s", first)
	}
}

// archive makes a real package with one file in it.
func archive(t *testing.T, name string) string {
	t.Helper()
	dir := t.TempDir()
	for file, contents := range map[string]string{
		"DEBIAN/control":    "Package: " + name + "\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: test\n",
		"DEBIAN/postinst":   "#!/bin/sh\ntouch /tmp/ran\n",
		"usr/share/" + name: "contents of " + name,
	} {
		path := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(contents), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	deb := filepath.Join(t.TempDir(), name+"_1_all.deb")
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "-b", dir, deb).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return deb
}

func TestFetchUnpacks(t *testing.T) {
	t.Setenv("TEST_DEB", archive(t, "hello"))
	fakeTools(t, map[string]string{"apt-get": `case " $* " in *" hello=1 "*) cp "$TEST_DEB" . ;; *) exit 1 ;; esac`})
	dir := t.TempDir()
	if err := (Lists{}).Fetch(context.Background(), dir, Package{Name: "hello", Version: "1"}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "usr/share/hello"))
	if err != nil || string(got) != "contents of hello" {
		t.Errorf("unpacked file: %q, %v", got, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".archives-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestFetchCarriesWhatAptSays(t *testing.T) {
	fakeTools(t, map[string]string{"apt-get": "echo 'E: hello cannot be authenticated' >&2; exit 100\n"})
	err := Lists{}.Fetch(context.Background(), t.TempDir(), Package{Name: "hello", Version: "1"})
	if err == nil || !strings.Contains(err.Error(), "cannot be authenticated") {
		t.Errorf("error %v doesn't say why", err)
	}
}

// The archive has only newer packages: the next attempt gets new lists. After another error, as without a network, they
// stay.
func TestOldListsAreRemoved(t *testing.T) {
	fakeTools(t, map[string]string{"apt-get": "echo \"$WHY\" >&2; exit 100\n"})
	for why, stay := range map[string]bool{"E: Failed to fetch hello.deb 404  Not Found": false, "E: Temporary failure resolving": true} {
		t.Setenv("WHY", why)
		l := Lists{Dir: filepath.Join(t.TempDir(), "lists")}
		if err := os.Mkdir(l.Dir, 0o700); err != nil {
			t.Fatal(err)
		}
		err := l.Fetch(t.Context(), t.TempDir(), Package{Name: "hello", Version: "1"})
		if _, gone := os.Stat(l.Dir); err == nil || !strings.Contains(err.Error(), why) || (gone == nil) != stay {
			t.Errorf("%s: %v, %v", why, err, gone)
		}
	}
}
