package squashfs

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTarHasFixedOwnersTimesAndOrder(t *testing.T) {
	var b bytes.Buffer
	in := Tree{"z/file": Content([]byte("z"), 0o644), "a": Link("z"), "m/program": Content([]byte("x"), 0o755), "tmp": Directory(0o777 | fs.ModeSticky)}
	if err := in.WriteTar(&b); err != nil {
		t.Fatal(err)
	}
	type line struct {
		Name string
		Mode int64
		Link string
	}
	var got []line
	for archive := tar.NewReader(&b); ; {
		h, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.ModTime.Unix() != 0 {
			t.Errorf("%s: owner %d:%d %s, time %v", h.Name, h.Uid, h.Gid, h.Uname, h.ModTime)
		}
		got = append(got, line{h.Name, h.Mode, h.Linkname})
	}
	want := []line{{"a", 0o777, "z"}, {"m/", 0o755, ""}, {"m/program", 0o755, ""}, {"tmp/", 0o1777, ""}, {"z/", 0o755, ""}, {"z/file", 0o644, ""}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
