// Nfsserver serves a folder with NFS 3, over TCP and without a portmapper,
// until it is killed. It is a separate module, so that its dependencies aren't
// part of any other build.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/go-git/go-billy/v5"
	"github.com/go-git/go-billy/v5/osfs"
	"github.com/willscott/go-nfs"
	"github.com/willscott/go-nfs/helpers"
)

// handles is how many file handles the server remembers.
const handles = 1024

func main() {
	address := flag.String("listen", "", "`address:port` at which it serves")
	folder := flag.String("folder", "", "the `path` that is served")
	export := flag.String("export", "/", "the path of the export for clients; other paths do not exist")
	flag.Parse()
	if err := serve(*address, *folder, *export); err != nil {
		fmt.Fprintf(os.Stderr, "nfsserver: serve %s at %s: %v\n", *folder, *address, err)
		os.Exit(1)
	}
}

func serve(address, folder, export string) error {
	l, err := net.Listen("tcp4", address)
	if err != nil {
		return err
	}
	shared := attributes{osfs.New(folder)}
	return nfs.Serve(l, helpers.NewCachingHandler(only{helpers.NewNullAuthHandler(shared), shared, export}, handles))
}

// only answers to one export path.
type only struct {
	nfs.Handler
	shared billy.Filesystem
	export string
}

func (o only) Mount(ctx context.Context, conn net.Conn, r nfs.MountRequest) (nfs.MountStatus, billy.Filesystem, []nfs.AuthFlavor) {
	if string(r.Dirpath) != o.export {
		return nfs.MountStatusErrNoEnt, o.shared, nil
	}
	return nfs.MountStatusOk, o.shared, []nfs.AuthFlavor{nfs.AuthFlavorNull, nfs.AuthFlavorUnix}
}

// attributes allows changes for which osfs has no functions.
type attributes struct{ billy.Filesystem }

func (a attributes) Chmod(name string, mode os.FileMode) error {
	return os.Chmod(a.Join(a.Root(), name), mode)
}

func (a attributes) Lchown(name string, uid, gid int) error {
	return os.Lchown(a.Join(a.Root(), name), uid, gid)
}

func (a attributes) Chown(name string, uid, gid int) error {
	return os.Chown(a.Join(a.Root(), name), uid, gid)
}

func (a attributes) Chtimes(name string, accessed, changed time.Time) error {
	return os.Chtimes(a.Join(a.Root(), name), accessed, changed)
}
