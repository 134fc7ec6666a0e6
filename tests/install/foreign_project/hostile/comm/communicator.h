#error "dsengine includes comm/communicator.h of the program"
