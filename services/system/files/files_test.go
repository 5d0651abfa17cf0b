package files

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/google/go-cmp/cmp"
)

// bench is the service over an image and a live root, which begins as the image:
// both directories.
type bench struct {
	t           *testing.T
	root, image string
	store       *resource.Store
	d           *Daemon
	console     strings.Builder
}

func newBench(t *testing.T, image map[string]string) *bench {
	t.Helper()
	b := &bench{t: t, root: t.TempDir(), image: t.TempDir()}
	for _, dir := range []string{b.root, b.image} {
		for _, top := range []string{"etc", "run", "var", "usr"} {
			must(t, os.MkdirAll(filepath.Join(dir, top), 0o755))
		}
		for path, content := range image {
			b.put(filepath.Join(dir, path), content)
		}
	}
	b.boot()
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// put makes a file, or a link where the content is an arrow.
func (b *bench) put(full, content string) {
	b.t.Helper()
	must(b.t, os.MkdirAll(filepath.Dir(full), 0o755))
	if to, link := strings.CutPrefix(content, "-> "); link {
		must(b.t, os.Symlink(to, full))
		return
	}
	must(b.t, os.WriteFile(full, []byte(content), 0o644))
}

// boot begins with the image's /etc, an empty /run, and a /var as it was.
func (b *bench) boot() {
	b.t.Helper()
	must(b.t, os.RemoveAll(filepath.Join(b.root, "run")))
	must(b.t, os.Mkdir(filepath.Join(b.root, "run"), 0o755))
	must(b.t, os.RemoveAll(filepath.Join(b.root, "etc")))
	must(b.t, os.CopyFS(filepath.Join(b.root, "etc"), os.DirFS(filepath.Join(b.image, "etc"))))
	b.store = resource.NewStore()
	b.d = New(Options{
		Store: b.store, Logs: logs.New(&b.console), root: b.root,
		image: func() image { return image{dir: b.image} },
	})
}

func (b *bench) configure(entries ...config.File) {
	b.t.Helper()
	c := &config.Config{Machine: config.Machine{Files: entries}}
	c.FillDefaults()
	must(b.t, configuration.Configs.Put(b.store.As("test"), configuration.ConfigID, c))
}

func (b *bench) lay(entries ...config.File) {
	b.t.Helper()
	b.configure(entries...)
	must(b.t, b.d.follow())
}

func (b *bench) is(path, want string, perm fs.FileMode) {
	b.t.Helper()
	full := filepath.Join(b.root, path)
	got, err := os.ReadFile(full)
	if err != nil || string(got) != want {
		b.t.Errorf("%s is %q (%v), want %q", path, got, err, want)
		return
	}
	if info, err := os.Stat(full); err != nil || info.Mode().Perm() != perm {
		b.t.Errorf("%s has mode %v (%v), want %v", path, info.Mode(), err, perm)
	}
}

func (b *bench) gone(path string) {
	b.t.Helper()
	if _, err := os.Lstat(filepath.Join(b.root, path)); !errors.Is(err, fs.ErrNotExist) {
		b.t.Errorf("%s is there (%v)", path, err)
	}
}

func (b *bench) problem(path, want string) {
	b.t.Helper()
	o, err := Statuses.Get(b.store, path)
	if err != nil || (want == "") != (o.Spec.Problem == "") || !strings.Contains(o.Spec.Problem, want) {
		b.t.Errorf("problem of %s is %q (%v), want %q", path, o.Spec.Problem, err, want)
	}
}

func entry(path, content string, op config.FileOp) config.File {
	return config.File{Path: path, Content: content, Op: op}
}

// S-140, Q-12: content is added to the image's own file; at each boot, and at
// each change, to that one.
func TestS140AppendIsToTheImagesFile(t *testing.T) {
	const bundle = "/etc/ssl/certs/ca-certificates"
	b := newBench(t, map[string]string{bundle: "first\n", bundle + ".crt": "-> ca-certificates", "/etc/ragged": "no end"})
	own := entry(bundle, "second\n", config.FileAppend)
	b.lay(own)
	b.is(bundle, "first\nsecond\n", 0o644)
	b.lay(own, entry(bundle+".crt", "third\n", config.FileAppend), entry("/etc/ragged", "line\n", config.FileAppend))
	b.is(bundle, "first\nsecond\nthird\n", 0o644)
	b.is("/etc/ragged", "no end\nline\n", 0o644)
	b.boot()
	b.lay(own)
	b.is(bundle, "first\nsecond\n", 0o644)
	b.is("/etc/ragged", "no end", 0o644)
	b.lay()
	b.is(bundle, "first\n", 0o644)
	if got := Statuses.List(b.store); len(got) > 0 {
		t.Errorf("statuses %v", got)
	}
}

// S-141: create makes what isn't there, overwrite takes the place of what is.
func TestS141CreateAndOverwrite(t *testing.T) {
	b := newBench(t, map[string]string{"/etc/nsswitch.conf": "hosts: files dns\n"})
	b.lay(
		entry("/etc/own/deep/file", "mine\n", config.FileCreate),
		entry("/etc/nsswitch.conf", "hosts: dns\n", config.FileCreate),
	)
	b.is("/etc/own/deep/file", "mine\n", 0o644)
	b.is("/etc/nsswitch.conf", "hosts: files dns\n", 0o644)
	b.problem("/etc/nsswitch.conf", "is in the image already: use op overwrite")
	b.problem("/etc/own/deep/file", "")

	b.lay(entry("/etc/nsswitch.conf", "hosts: dns\n", config.FileOverwrite))
	b.is("/etc/nsswitch.conf", "hosts: dns\n", 0o644)
	b.gone("/etc/own")
	b.lay()
	b.is("/etc/nsswitch.conf", "hosts: files dns\n", 0o644)
}

// S-142: octal permissions, exact, and content as it was written.
func TestS142PermissionsAndContent(t *testing.T) {
	b := newBench(t, nil)
	const content = "one\n\n  two  \n"
	b.lay(config.File{Path: "/etc/script", Content: content, Permissions: 0o751, Op: config.FileCreate})
	b.is("/etc/script", content, 0o751)
	b.lay(config.File{Path: "/etc/script", Content: content, Permissions: 0o600, Op: config.FileCreate})
	b.is("/etc/script", content, 0o600)
}

// S-143: what is laid in /var outlives a boot, and still leaves with the
// configuration; a boot in between changes nothing.
func TestS143DropInsInVar(t *testing.T) {
	b := newBench(t, nil)
	metrics := entry("/var/cri/conf.d/metrics.toml", "[metrics]\n", config.FileCreate)
	b.lay(metrics, entry("/var/tmp/log", "x\n", config.FileAppend))
	for range 2 {
		b.boot()
		b.lay(metrics, entry("/var/tmp/log", "x\n", config.FileAppend))
		b.is("/var/cri/conf.d/metrics.toml", "[metrics]\n", 0o644)
		b.is("/var/tmp/log", "x\n", 0o644)
		b.problem("/var/tmp/log", "")
	}
	b.boot()
	b.lay(metrics)
	b.gone("/var/tmp/log")
	b.boot()
	b.lay()
	b.gone("/var/cri/conf.d/metrics.toml")
}

// What others have made in /var is theirs.
func TestFilesOfOthersInVar(t *testing.T) {
	b := newBench(t, nil)
	b.put(filepath.Join(b.root, "/var/lib/app/state"), "theirs\n")
	b.lay(entry("/var/lib/app/state", "mine\n", config.FileCreate), entry("/var/lib/app/other", "mine\n", config.FileCreate))
	b.is("/var/lib/app/state", "theirs\n", 0o644)
	b.problem("/var/lib/app/state", "another program has made it")
	b.put(filepath.Join(b.root, "/var/lib/app/other"), "changed\n")
	b.lay(entry("/var/lib/app/state", "mine\n", config.FileOverwrite))
	b.is("/var/lib/app/state", "mine\n", 0o644)
	b.is("/var/lib/app/other", "changed\n", 0o644)
}

func TestPlacesThatAreRefused(t *testing.T) {
	b := newBench(t, map[string]string{"/etc/dir/file": "", "/etc/out": "-> ../usr", "/etc/nothing": "-> no/where", "/etc/loop": "-> loop"})
	must(t, os.Symlink(b.root+"/etc", filepath.Join(b.root, "var/etc")))
	must(t, os.Symlink("/", filepath.Join(b.root, "var/outside")))
	for path, want := range map[string]string{
		"/usr/bin/x":                       "files can be written only in /etc, /run, /var",
		"/etc":                             "files can be written only in",
		"/etc/../usr/x":                    "files can be written only in",
		"/etc/out/x":                       "leads to /usr/x, through a link: files can be written only in",
		"/etc/nothing":                     "is a link to nothing",
		"/etc/loop":                        "too many links",
		"/etc/dir":                         "not a regular file",
		"/etc/dir/file/x":                  "not a directory",
		"/etc/resolv.conf":                 "machine.network.nameservers",
		"/var/etc/resolv.conf":             "machine.network.nameservers",
		"/var/outside/etc/x":               "through a link",
		"/etc/kubernetes/manifests/x.yaml": "static pods",
		"/run/garboard/machine.sock":       "sockets",
		"/var/lib/garboard/files.yaml":     "notes what it has laid",
	} {
		b.lay(entry(path, "x\n", config.FileOverwrite))
		b.problem(path, want)
	}
	b.lay(entry("/etc/x", "1", config.FileCreate), entry("/var/etc/x", "2", config.FileCreate))
	b.problem("/var/etc/x", "is the same file as /etc/x")
	b.is("/etc/x", "1", 0o644)
}

// A record that someone has tampered with takes nothing away that isn't ours.
func TestRecordIsNotBelieved(t *testing.T) {
	b := newBench(t, map[string]string{"/etc/passwd": "root\n"})
	b.put(filepath.Join(b.root, "/usr/x"), "x")
	b.put(filepath.Join(b.root, recordFile), fmt.Sprintf("/etc/passwd: a\n/usr/x: %s\n/var/../usr/x: %s\n", digest([]byte("x")), digest([]byte("x"))))
	b.lay()
	b.is("/usr/x", "x", 0o644)
	b.is("/etc/passwd", "root\n", 0o644)
	b.boot()
	b.put(filepath.Join(b.root, recordFile), "[")
	b.lay(entry("/var/a", "a", config.FileCreate))
	b.is("/var/a", "a", 0o644)
}

// What the image isn't needed for goes on without it, and so does the service.
func TestNoImageToBeSeen(t *testing.T) {
	b := newBench(t, map[string]string{"/etc/x": "image"})
	b.d.o.image = func() image { return image{err: errors.New("operation not permitted")} }
	b.lay(entry("/etc/x", "1", config.FileAppend), entry("/etc/y", "2", config.FileOverwrite))
	b.problem("/etc/x", "operation not permitted")
	b.is("/etc/x", "image", 0o644)
	b.is("/etc/y", "2", 0o644)
	b.lay()
	b.is("/etc/y", "2", 0o644)
	b.d.o.image = func() image { return image{dir: b.image} }
	b.lay()
	b.gone("/etc/y")
}

// The service follows the configuration, says what is wrong once, and tries it
// again.
func TestServiceFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.put(filepath.Join(b.root, "/var/x"), "theirs")
		b.configure(entry("/etc/x", "1", config.FileCreate), entry("/var/x", "mine", config.FileCreate))
		graph, err := dag.New(dag.Options{}, b.d.Service())
		must(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- graph.Run(ctx) }()
		synctest.Wait()
		if s, _ := graph.Status(ID); !s.Up {
			t.Errorf("not up: %+v", s)
		}
		b.is("/etc/x", "1", 0o644)
		time.Sleep(10 * time.Minute) // virtual
		synctest.Wait()
		if got := b.console.String(); strings.Count(got, "another program has made it") != 1 {
			t.Errorf("console: %s", got)
		}
		must(t, os.Remove(filepath.Join(b.root, "/var/x")))
		time.Sleep(retryEvery)
		synctest.Wait()
		b.is("/var/x", "mine", 0o644)
		b.configure(entry("/etc/x", "2", config.FileCreate))
		must(t, Await(ctx, b.store))
		b.is("/etc/x", "2", 0o644)
		b.gone("/var/x")
		o, err := Statuses.Get(b.store, "/etc/x")
		want := Status{Op: config.FileCreate, Permissions: 0o644, Size: 1, SHA256: digest([]byte("2"))}
		if d := cmp.Diff(want, o.Spec); d != "" || err != nil {
			t.Errorf("%s, %v", d, err)
		}
		stop()
		must(t, <-ended)
	})
}
