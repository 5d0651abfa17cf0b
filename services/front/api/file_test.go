package api

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

// filesBelow is a client of a fileService whose root is a directory.
func filesBelow(t *testing.T, root string) garboardv1connect.FileServiceClient {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewFileServiceHandler(&fileService{root: root}))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return garboardv1connect.NewFileServiceClient(server.Client(), server.URL)
}

// content is that of big in fileTree: several chunks.
var content = strings.Repeat("0123456789\n", 30_000)

// fileTree has one of each kind of file.
func fileTree(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	for _, err := range []error{
		os.MkdirAll(at("etc/manifests/deep"), 0o755),
		os.WriteFile(at("etc/manifests/pod.yaml"), []byte("kind: Pod\n"), 0o640),
		os.WriteFile(at("etc/big"), []byte(content), 0o600),
		os.Symlink("big", at("etc/link")),
		os.Symlink("manifests", at("etc/linked")),
		os.Symlink("nowhere", at("etc/broken")),
		syscall.Mkfifo(at("etc/pipe"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	listener, err := net.Listen("unix", at("etc/socket"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return root
}

func listing(t *testing.T, files garboardv1connect.FileServiceClient, path string, depth uint32) (lines []string, err error) {
	t.Helper()
	stream, err := files.List(t.Context(), connect.NewRequest(&apiv1.ListFilesRequest{Path: path, Depth: depth}))
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for stream.Receive() {
		m := stream.Msg()
		line := m.GetMode() + " " + m.GetName()
		if m.GetLink() != "" {
			line += " -> " + m.GetLink()
		}
		if m.GetError() != "" {
			line += ": " + m.GetError()
		}
		lines = append(lines, line)
	}
	return lines, stream.Err()
}

// S-253: the first entry is the directory itself.
func TestS253ListFiles(t *testing.T) {
	t.Parallel()
	files := filesBelow(t, fileTree(t))
	etc := []string{
		"drwxr-xr-x .", "-rw------- big", "lrwxrwxrwx broken -> nowhere", "lrwxrwxrwx link -> big", "lrwxrwxrwx linked -> manifests",
		"drwxr-xr-x manifests", "prw------- pipe", "srwxr-xr-x socket",
	}
	deep := append(append(etc[:6:6], "drwxr-xr-x manifests/deep", "-rw-r----- manifests/pod.yaml"), etc[6:]...)
	for _, tc := range []struct {
		path  string
		depth uint32
		want  []string
	}{
		{"/etc", 0, etc},
		{"/etc/../etc/", 1, etc},
		{"/etc", 5, deep},
		{"/etc", 1 << 31, deep},
		{"/etc/big", 1, []string{"-rw------- ."}},
		{"/etc/linked", 1, []string{"lrwxrwxrwx . -> manifests", "drwxr-xr-x deep", "-rw-r----- pod.yaml"}},
		{"/etc/broken", 1, []string{"lrwxrwxrwx . -> nowhere"}},
	} {
		got, err := listing(t, files, tc.path, tc.depth)
		if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", tc.path, err, diff)
		}
	}
}

func TestLsMode(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]string{"/dev/null": "crw-rw-rw-", "/tmp": "drwxrwxrwt"} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := lsMode(info.Mode()); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	if got := lsMode(os.ModeSetuid | os.ModeSetgid | 0o751); got != "-rwsr-s--x" {
		t.Error(got)
	}
}

// A directory with too much in it is listed in part, and says so.
func TestListIsBounded(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for i := range 10_005 {
		if err := os.WriteFile(filepath.Join(root, "f"+strings.Repeat("x", i%100)+string(rune('a'+i/100%26))+string(rune('a'+i/2600))), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := listing(t, filesBelow(t, root), "/", 1)
	if err != nil || len(got) != 10_002 || !strings.Contains(got[1], "more than 10000 entries") {
		t.Errorf("%d entries, %v", len(got), err)
	}
}

func readAll(t *testing.T, stream *connect.ServerStreamForClient[apiv1.FileChunk], err error) ([]byte, error) {
	t.Helper()
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var data []byte
	for stream.Receive() {
		data = append(data, stream.Msg().GetData()...)
	}
	return data, stream.Err()
}

// S-254: files as they are, also those that the kernel makes up, and nothing else.
func TestS254ReadFiles(t *testing.T) {
	t.Parallel()
	files, node := filesBelow(t, fileTree(t)), filesBelow(t, "/")
	for _, tc := range []struct {
		name  string
		files garboardv1connect.FileServiceClient
		path  string
		code  connect.Code
		want  string // the beginning
	}{
		{"file", files, "/etc/big", 0, content},
		{"link", files, "/etc/link", 0, content},
		{"made up", node, "/proc/self/limits", 0, "Limit "},
		{"made up", node, "/sys/kernel/mm/transparent_hugepage/enabled", 0, ""},
		{"directory", files, "/etc", connect.CodeInvalidArgument, "is a directory"},
		{"pipe, which would wait", files, "/etc/pipe", connect.CodeInvalidArgument, "isn't a file with content: prw"},
		{"socket", files, "/etc/socket", connect.CodeInvalidArgument, "isn't a file with content: srw"},
		{"device without an end", node, "/dev/zero", connect.CodeInvalidArgument, "isn't a file with content: crw"},
		{"nothing", files, "/etc/nothing", connect.CodeNotFound, "no such file"},
		{"below a file", files, "/etc/big/x", connect.CodeNotFound, "not a directory"},
		{"broken link", files, "/etc/broken", connect.CodeNotFound, "no such file"},
		{"relative", files, "etc/big", connect.CodeInvalidArgument, "must begin with /"},
		{"empty", files, "", connect.CodeInvalidArgument, "must begin with /"},
	} {
		stream, err := tc.files.Read(t.Context(), connect.NewRequest(&apiv1.ReadFileRequest{Path: tc.path}))
		data, err := readAll(t, stream, err)
		if tc.code == 0 {
			if err != nil || !strings.HasPrefix(string(data), tc.want) || tc.files == files && len(data) != len(tc.want) {
				t.Errorf("%s: %d bytes, %v", tc.path, len(data), err)
			}
			continue
		}
		if connect.CodeOf(err) != tc.code || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.path, err)
		}
	}
}

func TestCopyFiles(t *testing.T) {
	t.Parallel()
	root := fileTree(t)
	files := filesBelow(t, root)
	copied := func(files garboardv1connect.FileServiceClient, path string) map[string]string {
		stream, err := files.Copy(t.Context(), connect.NewRequest(&apiv1.CopyFilesRequest{Path: path}))
		data, err := readAll(t, stream, err)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		found := map[string]string{}
		archive := tar.NewReader(bytes.NewReader(data))
		for {
			h, err := archive.Next()
			if errors.Is(err, io.EOF) {
				return found
			}
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			text, err := io.ReadAll(archive)
			if err != nil {
				t.Fatal(err)
			}
			found[h.Name] = string(h.Typeflag) + h.Linkname + string(text)
		}
	}
	want := map[string]string{
		"etc/": "5", "etc/big": "0" + content, "etc/broken": "2nowhere", "etc/link": "2big", "etc/linked": "2manifests", "etc/manifests/": "5",
		"etc/manifests/deep/": "5", "etc/manifests/pod.yaml": "0kind: Pod\n", "etc/pipe": "6",
	}
	if diff := cmp.Diff(want, copied(files, "/etc")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := copied(files, "/etc/manifests/pod.yaml"); len(got) != 1 || got["pod.yaml"] != "0kind: Pod\n" {
		t.Errorf("one file: %v", got)
	}
	// What the kernel makes up says no size, and some of it can't be read.
	made := copied(filesBelow(t, "/"), "/proc/self/net")
	if !strings.Contains(made["net/dev"], "lo:") {
		t.Errorf("net/dev: %q", made["net/dev"])
	}
	stream, err := files.Copy(t.Context(), connect.NewRequest(&apiv1.CopyFilesRequest{Path: "/nothing"}))
	if _, err := readAll(t, stream, err); connect.CodeOf(err) != connect.CodeNotFound {
		t.Error(err)
	}
}

// A file that shrinks while it is copied leaves an archive that can be read.
func TestCopyFileThatShrinks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "log")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	c := &copier{ctx: t.Context(), tar: tar.NewWriter(&shrinks{&out, path}), top: path}
	if err := errors.Join(c.file(path, "log"), c.finish()); err != nil {
		t.Fatal(err)
	}
	archive := tar.NewReader(&out)
	for _, want := range []string{"log", problemsName} {
		h, err := archive.Next()
		if err != nil || h.Name != want {
			t.Fatalf("%v, %v", h, err)
		}
		text, err := io.ReadAll(archive)
		if err != nil || want == problemsName && !strings.Contains(string(text), "zeros follow") {
			t.Errorf("%s: %s, %v", want, text, err)
		}
	}
}

// shrinks cuts a file when its header is written.
type shrinks struct {
	io.Writer
	path string
}

func (s *shrinks) Write(p []byte) (int, error) {
	if err := os.Truncate(s.path, 10); err != nil {
		return 0, err
	}
	return s.Writer.Write(p)
}
